"""The machine: its description, and what its GPU can do at most."""

import subprocess
from collections.abc import Callable
from typing import Any

from benchmarks import machine
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.timing import milliseconds

PACKAGES = ("triton", "peft", "datasets")


def jobs(quick: bool) -> dict[str, list[str]]:
    """One case."""
    return {"machine": ["machine"]}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Description, `flops` of a bf16 matrix product per second, and `bandwidth` of a copy in bytes per second."""
    import torch

    described = machine.describe(torch.get_num_threads())
    versions = described["versions"] | {name: v for name in PACKAGES if (v := machine.installed_version(name))}
    found = {**described, "dtype": "bfloat16", "versions": versions, "device": described["processor"]}
    if job.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        versions |= {"cuda": torch.version.cuda, "driver": _driver()}
        found |= {"device": properties.name, "device_memory_GiB": round(properties.total_memory / 2**30, 1)}
    return {**found, "flops": _flops(job), "bandwidth": _bandwidth(job)}


def _flops(job: Job) -> float:
    import torch

    n = 8192 if job.device == "cuda" else 256
    a, b = (torch.randn(n, n, device=job.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / _best(lambda: torch.mm(a, b), job)


def _bandwidth(job: Job) -> float:
    import torch

    size = 2**30 if job.device == "cuda" else 2**22
    source = torch.zeros(size, device=job.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), job)


def _best(call: Callable[[], Any], job: Job) -> float:
    """Seconds of a call: the median after a second's warm-up."""
    return milliseconds(call, job.device, 30, warm_seconds=0.01 if job.quick else 1.0) / 1e3


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except OSError:
        return "unknown"
