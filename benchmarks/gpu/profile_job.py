"""The profiler's measurements as a part of the kit."""

from typing import Any

from benchmarks.gpu.jobs import Job
from benchmarks.gpu.profile import profile

CASES: dict[str, dict[str, Any]] = {"defaults": {}, "no checkpointing": {"gradient_checkpointing": False}}
"""Options of each."""


def jobs(quick: bool) -> dict[str, list[str]]:
    """One process for all options."""
    return {"profile": ["defaults"] if quick else list(CASES)}


def measure(job: Job, case: str) -> dict[str, Any]:
    """`parts` (sampling, training) and `steps`, as `profile` gives them."""
    return profile(job.shape, job.output, dict(CASES[case]), job.device)
