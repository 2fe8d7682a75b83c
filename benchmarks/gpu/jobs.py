"""The kit's measurements as jobs. A job is a child process that measures its cases one after another.

A part is a module of this folder with two functions: `jobs(quick)` lists its jobs and their cases, and
`measure(job, case)` takes one measurement. To add a part, write such a module and name it in `PARTS`.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PARTS = ("correct", "step", "decode", "head", "attention", "memory", "profile")


@dataclass(frozen=True)
class Job:
    """Cases that share a process.

    Attributes:
        part: module of this folder; "machine" or one of `PARTS`.
        name: of the job, unique within the part.
        cases: names of its measurements.
        device: "cuda" or "cpu".
        quick: in miniature.
        folder: for output.
        seconds: left for the whole job.
        flops: bf16 operations per second of a large matrix product on this machine.
        bandwidth: bytes per second that a copy reads and writes.
    """

    part: str
    name: str
    cases: list[str]
    device: str
    quick: bool = False
    folder: str = "runs/gpu"
    seconds: float = 600.0
    flops: float = 0.0
    bandwidth: float = 0.0

    @property
    def shape(self) -> str:
        """The model of parts that measure a single one."""
        return "tiny" if self.quick else "Qwen2.5-1.5B"

    @property
    def output(self) -> Path:
        """Folder for what trainers write."""
        return Path(self.folder) / f"{self.part}-{self.name}"

    def dumped(self) -> str:
        """The job as the argument of its process."""
        return json.dumps(asdict(self))


def jobs_of(part: str, quick: bool) -> dict[str, list[str]]:
    """Names of a part's jobs, and the cases of each."""
    return _module(part).jobs(quick)


def missing_packages(part: str, name: str) -> list[str]:
    """Packages that a job needs and this machine lacks."""
    wanted = getattr(_module(part), "NEEDS", {}).get(name, [])
    return [package for package in wanted if importlib.util.find_spec(package) is None]


def run_job(text: str) -> None:
    """Measure a job's cases in this process; each is printed as a JSON line, all other output goes to stderr."""
    job = Job(**json.loads(text))
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    measure: Callable[[Job, str], dict[str, Any]] = _module(job.part).measure
    for case in job.cases:
        print(f"---- {job.part} {job.name} {case}", file=sys.stderr, flush=True)
        print(json.dumps({"case": case, **measure(job, case)}), file=records, flush=True)
        free_memory(job.device)


def free_memory(device: str) -> None:
    """Give back what the last measurement left behind."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _module(part: str) -> Any:
    return importlib.import_module(f"benchmarks.gpu.{part}")
