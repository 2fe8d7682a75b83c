"""Train the same small configurations at two commits and compare weights, logs and samples bit by bit.

    .venv/bin/python tools/compare_commits.py OLD NEW          # NEW may be "." (or WORKTREE): what is not yet committed
    .venv/bin/python tools/compare_commits.py main . --only lora,ddp
    .venv/bin/python tools/compare_commits.py main . --expect 'loss_bnpo=the mean is over tokens now'

A refactoring that is meant to change nothing must leave every configuration equal; the exit status is 1 if one differs
without being named by `--expect`, or fails. Configurations are those of this checkout (tools/golden/configurations.py)
for both commits; each commit's `src` runs with this interpreter, one thread and no network. Three digests are compared:
of the weights after training, of the logs without times (`EXCLUDED` in `tools/golden/child.py`), and of what reward
functions were called with. The earliest difference is shown. NEW always runs; results of OLD come from a cache if the
same sources have run with the same configurations, packages and processor. Runs named old_checkpoint* continue, at NEW,
from a checkpoint that OLD has written.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "covey-golden"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "numpy", "pillow", "torchvision")
CHECKPOINTS = "checkpoints"
COLUMNS = ("weights", "logs", "samples")
SECONDS = 900
"""Longest time for one process, which runs many configurations."""

Results = dict[str, dict[str, Any]]
"""Name of a configuration -> digests, logs and samples, or an error, as `golden.child` writes them."""


def main() -> int:
    options = parse()
    runs = launches(options.only)
    if options.list:
        print(*(f"{name}  ({launch})" for name, launch in runs.items()), sep="\n")
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="covey-golden-") as folder:
        old = Commit(options.old, Path(folder) / "old", options.cache)
        new = Commit(options.new, Path(folder) / "new", options.cache)
        before = old.results(runs, options.jobs, cached=not options.fresh)
        after = new.results(runs, options.jobs, checkpoints=old.cache / CHECKPOINTS)
    wrong = report(runs, before, after, [expectation(text) for text in options.expect])
    print(f"{len(runs)} configurations, {old} and {new}: {wrong} wrong, {time.perf_counter() - began:.0f} s")
    return int(wrong > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", default="HEAD", help="Commit to compare with; HEAD unless given.")
    parser.add_argument("new", nargs="?", default=".", help="Commit to check; the working tree unless given.")
    parser.add_argument("--only", default="*", help="Names or patterns of configurations, separated by commas.")
    parser.add_argument("--list", action="store_true", help="Print the names of configurations and stop.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes that run at a time.")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME[:COLUMN]=REASON",
        help=f"A difference that is intended, by name or pattern; COLUMN is one of {', '.join(COLUMNS)}.",
    )
    parser.add_argument("--fresh", action="store_true", help="Run OLD again even if its results are cached.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="Folder of cached results.")
    return parser.parse_args()


def launches(only: str) -> dict[str, str]:
    """The chosen configurations and how each is launched, in the order of `RUNS`.

    Raises:
        SystemExit: a name or pattern matches nothing.
    """
    code = (
        "import json; from golden.configurations import RUNS; print(json.dumps({n: r.launch for n, r in RUNS.items()}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment(ROOT / "src"), capture_output=True, text=True, check=True
    )
    found = json.loads(printed.stdout.splitlines()[-1])
    patterns = [pattern.strip() for pattern in only.split(",")]
    for pattern in patterns:
        if not fnmatch.filter(found, pattern):
            raise SystemExit(f"--only {pattern}: no configuration has this name; they are: {', '.join(found)}")
    return {n: launch for n, launch in found.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def environment(source: Path, **more: str) -> dict[str, str]:
    """Variables of a child: this source tree and these configurations, one thread, no network, no GPU."""
    foreign = ("ACCELERATE_", "FSDP_", "COVEY_", "GOLDEN_", "PYTHON", "WANDB_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    fixed = {
        "PYTHONPATH": os.pathsep.join([str(source), str(TOOLS)]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    return {**inherited, **fixed, **more}


class Commit:
    """A commit, or the working tree, whose configurations are run.

    Args:
        name: what `git rev-parse` understands; "." or "WORKTREE" for the working tree.
        folder: a place for its source tree and outputs.
        caches: folder of all caches.
    """

    def __init__(self, name: str, folder: Path, caches: Path):
        self.source, self.output, self.checkpoints = folder / "src", folder / "output", folder / CHECKPOINTS
        self.output.mkdir(parents=True)
        if name in (".", "WORKTREE"):
            shutil.copytree(ROOT / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(ROOT / "docs", folder / "docs")  # the meanings of metrics are read from a page
            self.label = "the working tree"
        else:
            commit = git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
            with tarfile.open(fileobj=BytesIO(git("archive", commit, "src", "docs"))) as archive:
                archive.extractall(folder, filter="data")
            self.label = f"{name} ({commit[:7]})"
        self.cache = caches / cache_key(self.source)

    def __str__(self) -> str:
        return self.label

    def results(
        self, runs: dict[str, str], jobs: int, *, cached: bool = False, checkpoints: Path | None = None
    ) -> Results:
        """Results of all configurations.

        Args:
            runs: names and launches.
            jobs: processes at a time.
            cached: take those that are in the cache, and run the others.
            checkpoints: what another commit has left, by the names of configurations that continue from there. Their
                results hold for this pair of commits and are not cached.
        """
        known = read(self.cache, runs) if cached else {}
        missing = {name: launch for name, launch in runs.items() if name not in known}
        print(f"{self}: {len(known)} cached, {len(missing)} to run", file=sys.stderr)
        if checkpoints is not None and checkpoints.exists():
            shutil.copytree(checkpoints, self.checkpoints)
        foreign = {path.name for path in self.checkpoints.glob("*")}
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self._run, batches(missing, jobs)))
        self._cache_all_but(foreign)
        return known | read(self.output, missing)

    def _run(self, batch: tuple[str, list[str]]) -> None:
        """Run configurations; one whose process ends without its result fails, and the next ones get a new process."""
        launch, names = batch
        while names:
            error = self._launch(launch, names)
            missing = [name for name in names if not (self.output / f"{name}.json").exists()]
            failed = missing if missing == names else missing[:1]
            for name in failed:
                (self.output / f"{name}.json").write_text(json.dumps({"error": error}))
            names = [name for name in missing if name not in failed]

    def _launch(self, launch: str, names: list[str]) -> str:
        """Run one process, or two, to their end; how they ended, with the last lines of their output."""
        command = [sys.executable, "-m"]
        if launch != "one":
            address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
            command += ["torch.distributed.run", "--nproc_per_node", "2", *address, "-m"]
        command += ["golden.child", str(self.source), str(self.output), *names]
        variables = environment(self.source, GOLDEN_CHECKPOINTS=str(self.checkpoints))
        log = self.output / f"{launch}-{names[0]}.log"
        with log.open("w") as printed:
            child = subprocess.Popen(
                command, env=variables, cwd=self.output, stdout=printed, stderr=printed, start_new_session=True
            )
            try:
                ended = f"status {child.wait(SECONDS)}"
            except subprocess.TimeoutExpired:
                ended = f"no result within {SECONDS} s"
            finally:
                if child.poll() is None:  # an interrupt, too, must not leave processes behind
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        printed_by_child = log.read_text().partition("torch/distributed/elastic")[0]  # not the launcher's own traceback
        return f"{launch}: {ended}\n{printed_by_child[-3000:]}"

    def _cache_all_but(self, foreign: set[str]) -> None:
        """Cache results without errors, and checkpoints, but those of `foreign` names."""
        self.cache.mkdir(parents=True, exist_ok=True)
        for path in self.output.glob("*.json"):
            if path.stem not in foreign and "error" not in json.loads(path.read_text()):
                shutil.copy(path, self.cache / path.name)
        for path in self.checkpoints.glob("*"):
            if path.name not in foreign:
                shutil.copytree(path, self.cache / CHECKPOINTS / path.name, dirs_exist_ok=True)


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, check=True).stdout


def cache_key(source: Path) -> str:
    """Digest of everything that decides the results: sources, this tool, packages, Python and processor."""
    sums = hashlib.sha256()
    for folder in (source, TOOLS / "golden"):
        for path in sorted(folder.rglob("*.py")):
            sums.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    sums.update(Path(__file__).read_bytes())
    sums.update(f"{[version(name) for name in PACKAGES]} {sys.version} {processor()}".encode())
    return sums.hexdigest()[:24]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The processor's model and instruction sets, which choose torch's kernels."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor() or platform.machine()
    return "\n".join(
        dict.fromkeys(re.findall(r"^(?:model name|model|flags|Features)\s*:.*", described.read_text(), re.M))
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def batches(runs: dict[str, str], jobs: int) -> list[tuple[str, list[str]]]:
    """Configurations by process: one launch for each kind of two processes, and `jobs` single processes."""
    by_launch: dict[str, list[str]] = {}
    for name, launch in runs.items():
        by_launch.setdefault(launch, []).append(name)
    single = by_launch.pop("one", [])
    shares = [("one", single[job::jobs]) for job in range(jobs)]
    return [batch for batch in [*by_launch.items(), *shares] if batch[1]]


def read(folder: Path, runs: dict[str, str]) -> Results:
    """The results that a folder has."""
    paths = {name: folder / f"{name}.json" for name in runs}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expectation:
    """A difference that is intended: patterns of a configuration's name and of a column, and the reason."""

    name: str
    column: str
    reason: str

    def covers(self, name: str, column: str) -> bool:
        return fnmatch.fnmatchcase(name, self.name) and fnmatch.fnmatchcase(column, self.column)


def expectation(text: str) -> Expectation:
    """Parse NAME[:COLUMN]=REASON.

    Raises:
        SystemExit: it has no reason, or another column.
    """
    where, _, reason = text.partition("=")
    name, _, column = where.partition(":")
    column = column or "*"
    if not reason or column not in ("*", *COLUMNS):
        raise SystemExit(f"--expect {text}: give NAME=REASON or NAME:COLUMN=REASON, COLUMN one of {', '.join(COLUMNS)}")
    return Expectation(name, column, reason)


def report(runs: dict[str, str], before: Results, after: Results, expected: list[Expectation]) -> int:
    """Print a line for each configuration; the number of those that failed or differ although nobody expects it."""
    wide = max(map(len, runs))
    print(f"{'configuration':{wide}}  {'s':>11}  {'weights':8} {'logs':8} {'samples':8}")
    wrong, shown = 0, set()
    for name in runs:
        old, new = before[name], after[name]
        errors = {side: result["error"] for side, result in (("OLD", old), ("NEW", new)) if "error" in result}
        seconds = "/".join(f"{result.get('seconds', 0):.1f}" for result in (old, new))
        if errors:
            wrong += 1
            print(f"{name:{wide}}  {seconds:>11}  FAILED at {' and '.join(errors)}")
            error = next(iter(errors.values()))
            print(indented("the same error as above" if error in shown else error))
            shown.add(error)
            continue
        differing = [column for column in COLUMNS if old[column] != new[column]]
        reasons = {column: [e.reason for e in expected if e.covers(name, column)] for column in differing}
        wrong += not all(reasons.values())
        cells = {column: "equal" if column not in differing else "expected" if reasons[column] else "DIFFERS"
                 for column in COLUMNS}  # fmt: skip
        print(f"{name:{wide}}  {seconds:>11}  " + " ".join(f"{cells[column]:8}" for column in COLUMNS).rstrip())
        if differing:
            why = dict.fromkeys(reason for each in reasons.values() for reason in each)
            print(indented("\n".join([*first_differences(old, new), *(f"expected: {reason}" for reason in why)])))
    return wrong


def first_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The earliest samples and logs that differ, and how far logs do; nothing where only the weights do."""
    first = first_sample(old["records"], new["records"]), first_log(old, new), largest_difference(old, new)
    return [line for line in first if line]


def first_sample(old: list[list[Any]], new: list[list[Any]]) -> str:
    """The earliest sample that only one side has: by step, function, names of arguments and digest of values."""
    sides = [(record, "OLD") for record in old if record not in new] + [(r, "NEW") for r in new if r not in old]
    if not sides:
        return "" if len(old) == len(new) else f"samples: OLD has {len(old)}, NEW has {len(new)}"
    (step, function, names, _), side = min(sides)
    others = [record for record in (new if side == "OLD" else old) if record[:2] == [step, function]]
    mine, theirs = set(names.split()), set(others[0][2].split()) if others else set()
    arguments = f"; only one side gives {', '.join(sorted(mine ^ theirs))}" if others and mine != theirs else ""
    return f"samples: step {step}, {function}: only {side} has such a completion{arguments}"


def largest_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The largest difference of a logged number, relative to numbers above 1."""
    pairs = [(name, before[name], after[name]) for before, after in zip(old["entries"], new["entries"], strict=False)
             for name in before.keys() & after.keys() if isinstance(before[name], float)]  # fmt: skip
    differences = [(abs(a - b) / max(1.0, abs(a)), name) for name, a, b in pairs if a != b and isinstance(b, float)]
    return "logs: no number differs by more than {:.0e} ({})".format(*max(differences)) if differences else ""


def first_log(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first log entry that differs: its step, and each name with both values."""
    entries = zip_longest(old["entries"], new["entries"], fillvalue={})
    for before, after in entries:
        names = [name for name in {**before, **after} if repr(before.get(name)) != repr(after.get(name))]
        if names:
            step = before.get("step", after.get("step"))
            shown = [f"{name} {before.get(name, 'missing')} -> {after.get(name, 'missing')}" for name in names[:3]]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"logs: step {step}: {'; '.join(shown)}{more}"
    return ""


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
