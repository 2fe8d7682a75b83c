"""Runs that are killed at random moments and in named places, resumed, and compared with undisturbed ones.

    python -m benchmarks.kills --trials 10            # of each mode; continues where an interrupted call stopped
    python -m benchmarks.kills --mode plain tools
    python -m benchmarks.kills --quick                # does it work?
    python -m benchmarks.kills --summary              # only the table and the pictures
    python -m benchmarks.kills --vllm-python .venv-vllm/bin/python --deepspeed-python .venv-deepspeed/bin/python

A trial starts a run of a tiny random model (`benchmarks/kills_run.py`) in a process of its own, ends it one to three
times by SIGKILL, SIGTERM or SIGINT, each time starting the same command again, and then lets it end. Every second kill
strikes at a random moment, the others in a named place: a stage of a step, of writing a checkpoint, of deleting an old
one, or of resuming. Then all of these must be equal to those of an undisturbed run, bit by bit:

- weights, optimizer, logs without times, the completions on record (parquet files), a study's variants;
- the multiset of (prompt, completion) pairs that were trained on. What a killed run trained on after its last
  checkpoint is trained on again by the next: these must be the same pairs, and count once.

SIGTERM and SIGINT must end a run within 25 seconds, with a checkpoint of the step they came in. With several processes
one of them is sent the signal; the others must end by themselves. In every fourth trial the last kill is not of the run
but of a worker of its rewards, or of its vLLM server (which is then started again): the run must continue. What a
server samples depends in its last bits on what else it samples then: only the multiset of (prompt, seed) pairs must be
equal.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from tests.real_vllm.serving import Running, serve
from tests.support import forking
from tests.support.launching import environment, free_port

from benchmarks.kills_run import MODES, SERVED, SERVER, SEVERAL, WORKERS, prepare
from benchmarks.records import Records

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "kills_run.py"
SIGNALS = (*["SIGKILL"] * 6, "SIGTERM", "SIGINT")
OTHER = "SIGKILL of another process"
SECONDS = 240.0  # for a process to end by itself, on a machine that is shared
STATUSES = {"SIGKILL": (-9,), "SIGTERM": (143,), "SIGINT": (130, 1, -2)}
NEEDS = {"4 bits": "bitsandbytes", "ZeRO-3": "deepspeed", **dict.fromkeys(SERVED, "vllm")}
BUSY = {"server": "sampling", "worker": "rewards"}
"""Places of a run in which another process works for it."""
COMPARED = ("pairs", "other pairs when trained again")
"""With a vLLM server."""


class Launch:
    """The processes of one start of a run: one, or two that train together."""

    def __init__(self, folder: Path, mode: str, due: Sequence[str] = (), victim: int = 0):
        self.folder, self.size = folder, 2 if mode in SEVERAL else 1
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


class Server:
    """A vLLM server with the model that runs train."""

    def __init__(self, folder: Path):
        self.folder = folder
        prepare(folder, server=True)
        self.running: Running | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again at the same address."""
        port = int(self.running.url.rpartition(":")[2]) if self.running else 0
        self.running = serve(self.folder, str(self.folder / "model"), port=port)
        os.environ[SERVER] = self.running.url

    def kill(self) -> None:
        """End it by SIGKILL."""
        assert self.running is not None and self.running.process.pid is not None
        os.kill(self.running.process.pid, signal.SIGKILL)


@functools.cache
def the_server(parent: Path) -> Server:
    """One server for all modes that need it, since it takes long to start."""
    return Server(Path(tempfile.mkdtemp(dir=parent)))


def kill_other(launch: Launch, chance: random.Random, seconds: float, server: Server | None) -> str | None:
    """Kill the server of a run, or a worker of it: the place it was in. None if it had ended, or has none."""
    until = time.monotonic() + chance.uniform(0.0, seconds)
    busy = BUSY["server" if server else "worker"] if chance.random() < 0.5 else None
    while time.monotonic() < until if busy is None else now_in(launch.folder, 0) != busy:
        if launch.processes[0].poll() is not None:
            return None
        time.sleep(0.001)
    place: str | None = now_in(launch.folder, 0)
    if server is not None:
        server.kill()
        server.start()
        return place
    children = psutil.Process(launch.processes[0].pid).children(recursive=True)
    workers = [child for child in children if any("function_worker" in word for word in child.cmdline())]
    place = place if workers else None
    for worker in workers[:1] if chance.random() < 0.5 else workers[-1:]:  # the guard of the first, or the last itself
        worker.kill()
    return place


def kill_once(
    folder: Path, mode: str, chance: random.Random, known: dict[str, Any], name: str, server: Server | None
) -> dict[str, Any]:
    """Start the run and end it by a signal: where it struck, and the statuses; `place` None if it had ended before."""
    victim = chance.randrange(2) if mode in SEVERAL else 0
    place: str | None = ""
    due: tuple[str, ...] = ()
    named = name != OTHER and chance.random() < 0.5
    if named:
        due = (where := chance.choice(sorted(known["places"])), str(chance.randint(1, known["places"][where])), name)
        place = where
    launch = Launch(folder, mode, due, victim)
    if not named and launch.begun():
        if name == OTHER:
            place = kill_other(launch, chance, 0.6 * known["seconds"], server)
        else:
            time.sleep(chance.uniform(0.0, 0.6 * known["seconds"]))  # a run that continues is shorter
            place = now_in(folder, victim)
            launch.processes[victim].send_signal(signal.Signals[name])
    began = time.monotonic()
    statuses = launch.end()
    if name == "SIGKILL":  # after the others it continues
        place = now_in(folder, victim)
    if name != OTHER and statuses[victim] not in STATUSES[name]:
        place = None
    seconds = time.monotonic() - began
    return {"random": not named, "signal": name, "place": place, "statuses": statuses, "seconds": seconds}


def now_in(folder: Path, rank: int) -> str:
    """The place that a process is in, or was when it ended."""
    return (folder / f"place.{rank}").read_bytes().rstrip(b"\0").decode()


def outcome(folder: Path, size: int) -> dict[str, Any]:
    """All that is compared of a run that has ended."""
    import pyarrow.parquet as pq

    files = sorted((folder / "run").rglob("[!.]*.parquet"))  # the others are what a kill left of a file
    files = [path for path in files if not path.parent.name.startswith("record_")]  # of a start without a checkpoint
    results = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("result.*.json"))}
    trained = [trained_on(path.read_text().splitlines()) for path in sorted(folder.glob("trained.*"))]
    assert len(results) == len(trained) >= size, [*results]
    study = folder / "run" / "study.json"
    pairs: Counter[str] = sum((once for once, _ in trained), Counter())
    return {
        "weights": [result["weights"] for result in results.values()],
        "optimizer": [result["optimizer"] for result in results.values()],
        "logs": {name: result["logs"] for name, result in results.items() if name.startswith("result.0.")},
        "variants": json.loads(study.read_text())["variants"] if study.exists() else None,
        "completions": {str(path.relative_to(folder)): without_seconds(pq.read_table(path)) for path in files},
        "pairs": dict(sorted(pairs.items())),
        "other pairs when trained again": sum(changed for _, changed in trained),
    }


def without_seconds(table: Any) -> str:
    return repr(table.drop_columns([name for name in table.column_names if name.endswith("seconds")]).to_pylist())


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


def wrong_in(mode: str, different: Sequence[str]) -> list[str]:
    """Names of what may not differ in that mode."""
    return [name for name in different if mode not in SERVED or name in COMPARED]


def folder_for(parent: Path, mode: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=parent))
    if mode in ("command line", WORKERS):
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


def trial(parent: Path, mode: str, number: int, known: dict[str, Any], server: Server | None = None) -> dict[str, Any]:
    """Kill a run a few times, let it end, and compare. Its folder stays if something differs."""
    chance = random.Random(f"{mode} {number}")
    folder = folder_for(parent, mode)
    names = chance.choices(SIGNALS, k=chance.randint(3, 5) if mode in SEVERAL else chance.randint(1, 3))
    names[0] = {2: "SIGTERM", 3: "SIGINT"}.get(number % 4, names[0])  # some in every mode
    if number % 4 == 1 and (server or mode == WORKERS):
        names[-1] = OTHER
    kills = [kill_once(folder, mode, chance, known, name, server) for name in names]
    launch = Launch(folder, mode)
    resumed = time.monotonic()
    statuses = launch.end()
    different: list[str] = []
    if set(statuses) == {0}:
        different = differences(known["outcome"], outcome(folder, launch.size))
        wrong = wrong_in(mode, different)
    else:
        wrong = [f"ended with {statuses}: {(folder / 'output.0').read_text()[-1500:]}"]
    late = [kill for kill in kills if None in kill["statuses"]]
    wrong += [f"did not continue: {kill}" for kill in kills if kill["signal"] == OTHER and set(kill["statuses"]) != {0}]
    wrong += [f"not ended by {kill['signal']} in {kill['place']}" for kill in late]
    if not wrong:
        shutil.rmtree(folder)
    seconds = time.monotonic() - resumed
    return {"kills": kills, "different": wrong, "allowed": different, "seconds": seconds, "folder": str(folder)}


def table(records: Records, modes: Sequence[str]) -> str:
    """Markdown: a row for each mode, and one for all."""
    lines = [
        "| mode | trials | kills | SIGKILL, of another process, SIGTERM, SIGINT | equal |",
        "|---|---|---|---|---|",
    ]
    rows = {mode: records.find(mode=mode) for mode in modes}
    rows = {mode: found for mode, found in rows.items() if found}
    rows["all"] = [one for found in rows.values() for one in found]
    for mode, found in rows.items():
        kills = struck(found)
        counts = Counter(kill["signal"] for kill in kills)
        shown = ", ".join(str(counts[name]) for name in ("SIGKILL", OTHER, "SIGTERM", "SIGINT"))
        equal = sum(not one["different"] for one in found)
        lines.append(f"| {mode} | {len(found)} | {len(kills)} | {shown} | {equal} of {len(found)} |")
    return "\n".join(lines)


def struck(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kills that came while the run was still there."""
    return [kill for one in trials for kill in one["kills"] if kill["place"] is not None]


def plot(records: Records, path: Path) -> None:
    """Two pictures: how many kills struck in each place, by signal; and in each mode and place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kills = [{**kill, "mode": one["mode"]} for one in records.find() for kill in struck([one])]
    places = [place for place, _ in Counter(kill["place"] for kill in kills).most_common()][::-1]
    height = 1 + 0.22 * len(places)
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    left = [0] * len(places)
    for name in sorted({kill["signal"] for kill in kills}):
        counts = Counter(kill["place"] for kill in kills if kill["signal"] == name)
        widths = [counts[place] for place in places]
        axes.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(title=f"Where {len(kills)} kills struck", xlabel="kills")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    modes = [mode for mode in MODES if any(kill["mode"] == mode for kill in kills)]
    cells = Counter((kill["place"], kill["mode"]) for kill in kills)
    figure, axes = pyplot.subplots(figsize=(4 + 0.4 * len(modes), 2.5 + height), layout="constrained")
    axes.imshow([[cells[place, mode] for mode in modes] for place in places[::-1]], aspect="auto", cmap="Blues")
    for (place, mode), count in cells.items():
        axes.text(modes.index(mode), places[::-1].index(place), str(count), ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(modes)), modes, rotation=60, ha="right")
    axes.set_yticks(range(len(places)), places[::-1])
    figure.savefig(path.with_stem(f"{path.stem}_by_mode"), dpi=110)
    pyplot.close("all")


def elsewhere(given: argparse.Namespace, mode: str) -> bool:
    """True if the mode needs a package that is not here: another interpreter tries it, if one is given for that."""
    package = NEEDS.get(mode)
    if package is None or find_spec(package) is not None:
        return False
    python = getattr(given, f"{package}_python", None)
    if python is None:
        print(f"{mode}: skipped, {package} is not installed; give --{package}-python if another environment has it")
    else:
        options = ["--mode", mode, "--trials", str(given.trials), "--output", str(given.output), "--no-summary"]
        subprocess.run([python, "-m", "benchmarks.kills", *options], check=False)
    return True


def try_mode(records: Records, runs: Path, mode: str, trials: int) -> None:
    """Trials of a mode that are not on record yet."""
    missing = [number for number in range(trials) if not records.find(mode=mode, trial=number)]
    server = the_server(runs) if missing and mode in SERVED else None
    known = undisturbed(runs, mode) if missing else {}
    for number in missing:
        one = records.add(mode=mode, trial=number, **trial(runs, mode, number, known, server))
        print(f"{mode} {number}: {', '.join(one['different']) or 'equal'}", flush=True)


def main() -> int:
    """Command line; the exit status is 1 if a run differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--trials", type=int, default=8, help="of each mode")
    parser.add_argument("--output", type=Path, default=Path("runs/kills"), help="for records and runs that differ")
    parser.add_argument("--plot", type=Path, default=HERE / "kills.png")
    parser.add_argument("--quick", action="store_true", help="two trials of two modes, into a folder of their own")
    parser.add_argument("--summary", action="store_true", help="only write the table and the pictures")
    parser.add_argument("--no-summary", action="store_true", help="only try and write records")
    for package in ("vllm", "deepspeed"):
        parser.add_argument(f"--{package}-python", help=f"interpreter of an environment that has {package}")
    given = parser.parse_args()
    if given.quick:
        given.mode, given.trials, given.output = ["plain", "off-policy"], 2, Path(tempfile.mkdtemp())
        given.plot = given.output / "kills.png"
    records = Records(given.output / "records.jsonl")
    runs = (given.output / "runs").resolve()
    runs.mkdir(parents=True, exist_ok=True)
    for mode in [] if given.summary else given.mode:
        if not elsewhere(given, mode):
            try_mode(records, runs, mode, given.trials)
    if given.no_summary:
        return 0
    if struck(records.find()):
        plot(records, given.plot)
    print(table(records, given.mode))
    return int(any(one["different"] for one in records.find()))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
