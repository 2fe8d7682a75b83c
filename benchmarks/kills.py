"""Runs that are killed at random moments and in named places, resumed, and compared with undisturbed ones.

    python -m benchmarks.kills --trials 10            # of each mode; goes on where an interrupted call stopped
    python -m benchmarks.kills --mode plain tools
    python -m benchmarks.kills --quick                # does it work?
    python -m benchmarks.kills --summary              # only the table and the picture

A trial starts a run of a tiny random model (`benchmarks/kills_run.py`) in a process of its own, ends it one to three
times by SIGKILL, SIGTERM or SIGINT, each time starting the same command again, and then lets it end. Every second kill
strikes at a random moment, the others in a named place: a stage of a step, of writing a checkpoint, of deleting an old
one, or of resuming. Then all of these must be equal to those of an undisturbed run, bit by bit:

- weights, optimizer, logs without times, the completions on record (parquet files);
- the multiset of (prompt, completion) pairs that were trained on. What a killed run trained on after its last
  checkpoint is trained on again by the next: these must be the same pairs, and count once.

SIGTERM and SIGINT must end a run within 25 seconds, with a checkpoint of the step they came in.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import forking
from tests.support.launching import environment, free_port

from benchmarks.kills_run import MODES, prepare
from benchmarks.records import Records

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "kills_run.py"
SIGNALS = (*["SIGKILL"] * 6, "SIGTERM", "SIGINT")
SECONDS = 240.0  # for a process to end by itself, on a machine that is shared
STATUSES = {"SIGKILL": (-9,), "SIGTERM": (143,), "SIGINT": (130, 1, -2)}


class Launch:
    """The processes of one start of a run: one, or two that train together."""

    def __init__(self, folder: Path, mode: str, due: Sequence[str] = (), victim: int = 0):
        self.folder, self.size = folder, 2 if mode == "two processes" else 1
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for path in folder.glob("begun.*"):
            path.unlink()
        self.processes = []
        for rank in range(self.size):
            more = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} if self.size > 1 else {}
            words = [sys.executable, str(SCRIPT), str(folder), mode, *(due if rank == victim else ())]
            with (folder / f"output.{rank}").open("ab") as output:
                env = environment(**more)
                self.processes.append(forking.Forked(words, env=env, stdout=output, stderr=output))

    def begun(self) -> bool:
        """True once every process is about to train; False if one has ended before."""
        while not all((self.folder / f"begun.{rank}").exists() for rank in range(self.size)):
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.005)
        return True

    def end(self, seconds: float = SECONDS) -> list[int | None]:
        """Wait for all processes; the statuses, None for one that did not end in time and was killed."""
        until = time.monotonic() + seconds
        statuses: list[int | None] = []
        for process in self.processes:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            statuses.append(process.returncode)
            process.kill()
            process.wait()
        return statuses


def kill_once(folder: Path, mode: str, chance: random.Random, known: dict[str, Any]) -> dict[str, Any]:
    """Start the run and end it by a signal: where it struck, and the statuses; `place` None if it had ended before."""
    name = chance.choice(SIGNALS)
    victim = chance.randrange(2) if mode == "two processes" else 0
    if chance.random() < 0.5:
        place = chance.choice(sorted(known["places"]))
        due = (place, str(chance.randint(1, known["places"][place])), name)
        launch, found = Launch(folder, mode, due, victim), {"random": False}
    else:
        launch, found, place = Launch(folder, mode), {"random": True}, "start"
        if launch.begun():
            time.sleep(chance.uniform(0.0, known["seconds"]))
            place = now_in(folder, victim)
            launch.processes[victim].send_signal(signal.Signals[name])
    began = time.monotonic()
    statuses = launch.end()
    struck = statuses[victim] in STATUSES[name]
    place = now_in(folder, victim) if name == "SIGKILL" else place  # after the others it goes on
    return {
        **found,
        "signal": name,
        "place": place if struck else None,
        "statuses": statuses,
        "seconds": time.monotonic() - began,
    }


def now_in(folder: Path, rank: int) -> str:
    """The place that a process is in, or was when it ended."""
    return (folder / f"place.{rank}").read_bytes().rstrip(b"\0").decode()


def outcome(folder: Path, size: int) -> dict[str, Any]:
    """All that is compared of a run that has ended."""
    import pyarrow.parquet as pq

    files = sorted((folder / "run").rglob("*.parquet"))
    results = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(size)]
    trained = [trained_on((folder / f"trained.{rank}").read_text().splitlines()) for rank in range(size)]
    pairs: Counter[str] = sum((once for once, _ in trained), Counter())
    return {
        "weights": [result["weights"] for result in results],
        "optimizer": [result["optimizer"] for result in results],
        "logs": results[0]["logs"],
        "completions": {str(path.relative_to(folder)): repr(pq.read_table(path).to_pylist()) for path in files},
        "pairs": dict(sorted(pairs.items())),
        "other pairs when trained again": sum(changed for _, changed in trained),
    }


def trained_on(lines: Sequence[str]) -> tuple[Counter[str], int]:
    """The pairs that a process trained on, and how many it had trained on in a step that then had others.

    A start that resumes from a step does not count what earlier ones did from there on. A step that was not completed
    before a kill may have had fewer pairs than when it was taken again, but no others.
    """
    steps: dict[int, Counter[str]] = {}
    before: dict[int, list[Counter[str]]] = {}
    for line in map(json.loads, filter(complete, lines)):
        if "resumed" in line:
            for step in [step for step in steps if step >= line["resumed"]]:
                before.setdefault(step, []).append(steps.pop(step))
        else:
            steps.setdefault(line["step"], Counter()).update(line["pairs"])
    changed = sum((old - steps.get(step, Counter())).total() for step, olds in before.items() for old in olds)
    kept = {f"{step}: {pair}": count for step, found in steps.items() for pair, count in found.items()}
    return Counter(kept), changed


def complete(line: str) -> bool:
    """False for what a kill left of a line."""
    return line.endswith("}")


def differences(undisturbed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is not equal."""
    return [name for name, value in undisturbed.items() if found[name] != value]


def folder_for(parent: Path, mode: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=parent))
    if mode == "command line":
        prepare(folder)
    return folder


def undisturbed(parent: Path, mode: str) -> dict[str, Any]:
    """An undisturbed run: its outcome, seconds of training, and how often it entered each place."""
    folder = folder_for(parent, mode)
    launch = Launch(folder, mode)
    assert launch.begun(), (folder / "output.0").read_text()[-3000:]
    began = time.monotonic()
    assert set(launch.end()) == {0}, (folder / "output.0").read_text()[-3000:]
    found = outcome(folder, launch.size)
    places = json.loads((folder / "places.0.json").read_text())
    return {"outcome": found, "seconds": time.monotonic() - began, "places": places}


def trial(parent: Path, mode: str, number: int, known: dict[str, Any], most_kills: int = 3) -> dict[str, Any]:
    """Kill a run a few times, let it end, and compare. Its folder stays if something differs."""
    chance = random.Random(f"{mode} {number}")
    folder = folder_for(parent, mode)
    kills = [kill_once(folder, mode, chance, known) for _ in range(chance.randint(1, most_kills))]
    launch = Launch(folder, mode)
    resumed = time.monotonic()
    statuses = launch.end()
    if set(statuses) == {0}:
        wrong = differences(known["outcome"], outcome(folder, launch.size))
    else:
        wrong = [f"ended with {statuses}: {(folder / 'output.0').read_text()[-1500:]}"]
    late = [kill for kill in kills if None in kill["statuses"]]
    wrong += [f"not ended by {kill['signal']} in {kill['place']}" for kill in late]
    if not wrong:
        shutil.rmtree(folder)
    return {"kills": kills, "different": wrong, "seconds": time.monotonic() - resumed, "folder": str(folder)}


def table(records: Records, modes: Sequence[str]) -> str:
    """Markdown: a row for each mode, and one for all."""
    lines = ["| mode | trials | kills | of these SIGTERM, SIGINT | equal |", "|---|---|---|---|---|"]
    rows = {mode: records.find(mode=mode) for mode in modes}
    rows = {mode: found for mode, found in rows.items() if found}
    rows["all"] = [one for found in rows.values() for one in found]
    for mode, found in rows.items():
        kills = struck(found)
        soft = [sum(kill["signal"] == name for kill in kills) for name in ("SIGTERM", "SIGINT")]
        equal = sum(not one["different"] for one in found)
        lines.append(f"| {mode} | {len(found)} | {len(kills)} | {soft[0]}, {soft[1]} | {equal} of {len(found)} |")
    return "\n".join(lines)


def struck(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kills that came while the run was still there."""
    return [kill for one in trials for kill in one["kills"] if kill["place"] is not None]


def plot(records: Records, path: Path) -> None:
    """Histogram: how many kills struck in each place, by signal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kills = struck(records.find())
    places = [place for place, _ in Counter(kill["place"] for kill in kills).most_common()][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(places)), layout="constrained")
    left = [0] * len(places)
    for name in ("SIGKILL", "SIGTERM", "SIGINT"):
        counts = Counter(kill["place"] for kill in kills if kill["signal"] == name)
        widths = [counts[place] for place in places]
        axes.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(title=f"Where {len(kills)} kills struck", xlabel="kills")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Command line; the exit status is 1 if a run differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--trials", type=int, default=8, help="of each mode")
    parser.add_argument("--output", type=Path, default=Path("runs/kills"), help="for records and runs that differ")
    parser.add_argument("--plot", type=Path, default=HERE / "kills.png")
    parser.add_argument("--quick", action="store_true", help="two trials of two modes, into a folder of their own")
    parser.add_argument("--summary", action="store_true", help="only write the table and the picture")
    given = parser.parse_args()
    if given.quick:
        given.mode, given.trials, given.output = ["plain", "off-policy"], 2, Path(tempfile.mkdtemp())
        given.plot = given.output / "kills.png"
    records = Records(given.output / "records.jsonl")
    runs = (given.output / "runs").resolve()
    runs.mkdir(parents=True, exist_ok=True)
    for mode in [] if given.summary else given.mode:
        missing = [number for number in range(given.trials) if not records.find(mode=mode, trial=number)]
        known = undisturbed(runs, mode) if missing else {}
        for number in missing:
            one = records.add(mode=mode, trial=number, **trial(runs, mode, number, known))
            print(f"{mode} {number}: {', '.join(one['different']) or 'equal'}", flush=True)
    if struck(records.find()):
        plot(records, given.plot)
    print(table(records, given.mode))
    return int(any(one["different"] for one in records.find()))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
