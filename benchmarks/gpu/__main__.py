"""`make gpu`: what one CUDA machine shows about Covey, part by part, written to a JSON file after every measurement.

    python -m benchmarks.gpu --part step --part decode --minutes 9

Each job runs in a process of its own, which ends with the part's minutes. An interrupted run continues when it is
started again, and tries what failed once more; `--fresh` starts over. `--quick` runs everything in miniature, on a CPU
if need be, to check that it works: its figures mean nothing.
"""

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import PARTS, Job, jobs_of, missing_packages, run_job
from benchmarks.gpu.table import summary

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
LAST_LINES = 12


class Results:
    """The JSON file: the machine, and the records of every part.

    Args:
        path: of the file.
        fresh: forget what it holds.
    """

    def __init__(self, path: Path, fresh: bool = False):
        self.path = path
        self.content: dict[str, Any] = {"machine": {}, "records": []}
        if path.exists() and not fresh:
            self.content = json.loads(path.read_text())

    @property
    def records(self) -> list[dict[str, Any]]:
        """All measurements, failed ones among them."""
        return self.content["records"]

    def has(self, part: str, job: str, case: str) -> bool:
        """True when the case was measured without an error."""
        key = (part, job, case)
        return any((r["part"], r["job"], r["case"]) == key and "error" not in r for r in self.records)

    def add(self, **record: Any) -> None:
        """Write one down in place of an earlier one of the same case."""
        key = [record[name] for name in ("part", "job", "case")]
        self.records[:] = [r for r in self.records if [r[name] for name in ("part", "job", "case")] != key]
        self.records.append(record)
        self.write()

    def write(self) -> None:
        """Replace the file at once, so that it is whole at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(temporary, self.path)


class Kit:
    """Runs jobs and keeps their records.

    Args:
        results: where they go.
        given: options of the command line.
    """

    def __init__(self, results: Results, given: argparse.Namespace):
        self.results = results
        self.given = given
        self.logs = given.out.with_name(f"{given.out.stem}-logs")

    def describe_machine(self) -> None:
        """Measure the machine.

        Raises:
            SystemExit: it cannot be measured, or the records are of another one.
        """
        known = self.results.content["machine"]
        found: list[dict[str, Any]] = []
        error = self._run(self._job("machine", "machine", ["machine"], 300.0), found.append)
        if error:
            sys.exit(f"the machine could not be measured: {error}")
        device = found[0]["device"]
        if known and known["device"] != device:
            sys.exit(f"{self.given.out} is about {known['device']}, and this is {device}: choose another --out")
        self.results.content["machine"] = {name: value for name, value in found[0].items() if name != "case"}
        self.results.write()

    def run_part(self, part: str) -> None:
        """Run the jobs of a part that are not on record, until its time is up."""
        deadline = time.monotonic() + 60 * self.given.minutes
        for name, cases in jobs_of(part, self.given.quick).items():
            if self.given.only and name not in self.given.only:
                continue
            if lacking := missing_packages(part, name):
                print(f"{part} {name}: left out, {', '.join(lacking)} is not installed", flush=True)
                continue
            wanted = [case for case in cases if not self.given.case or case in self.given.case]
            missing = [case for case in wanted if not self.results.has(part, name, case)]
            while missing and (left := deadline - time.monotonic()) > 1:
                note = functools.partial(self._note, part, name, missing)
                error = self._run(self._job(part, name, missing, left), note)
                if error and missing and time.monotonic() < deadline:  # continue with the next case
                    note({"case": missing[0], "error": error})
            if missing:
                print(f"{part} {name}: out of time, not measured: {', '.join(missing)}", flush=True)

    def _note(self, part: str, name: str, missing: list[str], record: dict[str, Any]) -> None:
        missing.remove(record["case"])
        self.results.add(part=part, job=name, **record)
        shown = {key: value for key, value in record.items() if isinstance(value, int | float | str) and key != "case"}
        figures = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(f"{part} {name} {record['case']}: {figures}", flush=True)

    def _job(self, part: str, name: str, cases: list[str], seconds: float) -> Job:
        machine, given = self.results.content["machine"], self.given
        return Job(
            part,
            name,
            list(cases),
            given.device,
            given.quick,
            folder=str(self.logs),
            seconds=seconds,
            flops=machine.get("flops", 0.0),
            bandwidth=machine.get("bandwidth", 0.0),
        )

    def _run(self, job: Job, note: Callable[[dict[str, Any]], object]) -> str | None:
        """Run a job in a child process until its time is up; the last lines of its log if it failed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / re.sub(r"[^\w.-]+", "-", f"{job.part}-{job.name}.log")
        command = [sys.executable, "-m", "benchmarks.gpu", "--job", job.dumped()]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=_environment(), process_group=0
            )
            timer = threading.Timer(job.seconds, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    note(json.loads(line))
                code = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if not code:
            return None
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
        return "\n".join([f"ended with {code}", *(line[:400] for line in lines)])


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": ":".join(paths)}


def main() -> int:
    """Measure what is not on record; the exit code is 1 when something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; all if absent")
    parser.add_argument("--case", action="append", help="name of a case, such as W1; may be repeated; all if absent")
    parser.add_argument("--only", action="append", metavar="JOB", help="may be repeated; all jobs of a part if absent")
    parser.add_argument("--minutes", type=float, default=9.0, help="for each part")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda unless --quick is given and there is none")
    parser.add_argument("--out", type=Path, help=f"{RESULTS.relative_to(ROOT)}, or a file in runs/ with --quick")
    parser.add_argument("--quick", action="store_true", help="everything in miniature")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        run_job(given.job)
        return 0
    given.out = (given.out or (ROOT / "runs" / "gpu-quick" / "results.json" if given.quick else RESULTS)).resolve()
    given.device = given.device or ("cpu" if given.quick and not _has_cuda() else "cuda")
    results = Results(given.out, given.fresh)
    kit = Kit(results, given)
    kit.describe_machine()
    for part in given.part or PARTS:
        kit.run_part(part)
    print(summary(results.content))
    return int(any("error" in record for record in results.records))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
