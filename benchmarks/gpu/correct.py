"""The tests that need a GPU, in at most four minutes; on a CPU a few others, to see that tests run at all."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import Job

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 240
ON_CPU = ["tests/engines/native/test_cuda_graph.py", "-k", "replay"]
OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
LAST_LINES = 60


def jobs(quick: bool) -> dict[str, list[str]]:
    """All tests at once."""
    return {"correct": ["tests"]}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Counts of outcomes, names and messages of failures; `complete` unless time ran out."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--color=no"]
    command += ["-m", "gpu", *_files()] if job.device == "cuda" else ON_CPU
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            output = process.communicate(timeout=max(1.0, min(MOST_SECONDS, job.seconds - 5)))[0]
            complete = True
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, complete = process.communicate()[0], False
    print(output, file=sys.stderr)
    return {**counted(output), "seconds": time.monotonic() - start, "complete": complete, "code": process.returncode}


def counted(output: str) -> dict[str, Any]:
    """Counts and failures in what `pytest -v` prints."""
    outcomes = [match.groups() for line in output.splitlines() if (match := OUTCOME.match(line))]
    counts = {word.lower(): sum(word == outcome for _, outcome in outcomes) for word in ("PASSED", "FAILED", "SKIPPED")}
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    bad = failures or counts["failed"] or not outcomes
    return {**counts, "failures": failures, **({"output": output.splitlines()[-LAST_LINES:]} if bad else {})}


def _files() -> list[str]:
    """Files with such tests; others may import packages that a bare machine lacks."""
    found = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return sorted(str(path.relative_to(ROOT)) for path in found)
