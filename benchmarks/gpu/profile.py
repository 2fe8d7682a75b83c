"""Kernels, launches and idle time of sampling and of one training pass, by torch's profiler."""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.jobs import Job
from benchmarks.gpu.training import Run
from benchmarks.workloads import Workload

CASES: dict[str, dict[str, Any]] = {"defaults": {}, "no checkpointing": {"gradient_checkpointing": False}}
"""Options of each."""

TOP = 16
"""Kernels and host operations that are recorded, those with most time."""

WORKLOAD = Workload("profile", 64, 8, 8, 32)
"""Short completions: every kernel of a replayed graph is an event."""


def jobs(quick: bool) -> dict[str, list[str]]:
    """One process for all options."""
    return {"profile": ["defaults"] if quick else list(CASES)}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Profile the third measured step: sampling, and the first forward and backward pass.

    Returns:
        `steps`, and in `parts` for each of the two: wall seconds, seconds with a kernel running, idle share,
        launches, kernels and host operations with most time, as (name, milliseconds, calls).
    """
    run = Run("covey", WORKLOAD, job.shape, job.output, dict(CASES[case]), job.device)
    found: dict[str, Any] = {}
    step = 0

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if step != 3 or name in found:
                return original(*args, **kwargs)
            result, found[name] = _record(lambda: original(*args, **kwargs), run.synchronize, job.device)
            return result

        return call

    def begin(number: int) -> None:
        nonlocal step
        step = number

    collector, runner = run.trainer.collector, run.trainer.updates.runner
    collector.collect = recorded("sampling", collector.collect)
    runner.run = recorded("training", runner.run)
    return {"steps": run.steps(3, begin), "parts": found}


def _record(call: Callable[[], Any], synchronize: Callable[[], None], device: str) -> tuple[Any, dict[str, Any]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    synchronize()
    with torch_profile(activities=kinds) as profiled:
        start = time.perf_counter()
        result = call()
        synchronize()
        wall = time.perf_counter() - start
    events = profiled.events()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA
    )
    busy, until = 0.0, 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    table = profiled.key_averages()
    kernels = sorted((a for a in table if a.device_type == DeviceType.CUDA), key=lambda a: -a.self_device_time_total)
    host = sorted((a for a in table if a.device_type == DeviceType.CPU), key=lambda a: -a.self_cpu_time_total)
    return result, {
        "seconds": wall,
        "busy": busy / 1e6,
        "idle_share": 1 - busy / 1e6 / wall,
        "launches": len(spans),
        "kernels": [(a.key[:90], a.self_device_time_total / 1e3, a.count) for a in kernels[:TOP]],
        "host": [(a.key[:60], a.self_cpu_time_total / 1e3, a.count) for a in host[:TOP]],
    }
