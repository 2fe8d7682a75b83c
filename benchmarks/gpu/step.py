"""One optimizer step on Covey and on TRL: defaults, best settings, and TRL with continuous batching."""

import statistics
from typing import Any

from benchmarks.flops import minimum_flops, size_of
from benchmarks.gpu import models
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.training import Run
from benchmarks.libraries import continuous_batching
from benchmarks.workloads import WORKLOADS, Workload

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "covey_default": ("covey", {}),
    "trl_default": ("trl", {}),
    "covey_best": ("covey", {"gradient_checkpointing": False}),
    "trl_best": ("trl", {"gradient_checkpointing": False}),
    "trl_continuous": ("trl", {"gradient_checkpointing": False, "use_transformers_continuous_batching": True}),
}
"""Library and options of each."""

MICRO_BATCH = {"W1": 64, "W2": 16, "W3": 32, "long": 2, "uneven": 8}
"""Of TRL without gradient checkpointing: what fits 80 GB next to 1.5 billion float32 weights and their optimizer."""

NEEDS = {name: ["trl"] for name, (library, _) in CONTENDERS.items() if library == "trl"}
STEPS = 3
LARGE = {
    **WORKLOADS,
    "long": Workload("long", 4096, 8, 16, 256),
    "uneven": Workload("uneven", 256, 8, 16, 200, cap=1024),
}
TINY = {"W1": Workload("W1", 8, 2, 2, 4), "W3": Workload("W3", 8, 2, 2, 4, cap=8, with_signal=2)}
CONTINUOUS_ON_GPU = {"page_size": 256, "max_batch_tokens": 4096}


def jobs(quick: bool) -> dict[str, list[str]]:
    """A job for each contender, so that it starts once; a case for each workload."""
    return {name: list(TINY if quick else LARGE) for name in CONTENDERS}


def measure(job: Job, case: str) -> dict[str, Any]:
    """A warm-up step and some more of one contender on one workload.

    Returns:
        Medians over the steps, `steps` one by one, and `mfu`: the least operations of the work over what the machine
        could have done in the time, `train` in the training passes and `step` in all.
    """
    workload = (TINY if job.quick else LARGE)[case]
    library, given = CONTENDERS[job.name]
    options = {**given, **_options(job, workload)}
    run = Run(library, workload, job.shape, job.output, options, job.device)
    warm_up, *steps = run.steps(1 if job.quick else STEPS)
    flops = [_flops(job.shape, workload, step["number"]) for step in steps]
    seconds = statistics.median(step["seconds"] for step in steps)
    return {
        "workload": workload.describe(),
        "options": {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)},
        "parameters": run.parameters,
        "warm_up_seconds": warm_up["seconds"],
        "seconds": seconds,
        "phases": {name: statistics.median(s["phases"].get(name, 0.0) for s in steps) for name in _phases(steps)},
        "peak": max((s["peak"] for s in steps if "peak" in s), default=None),
        "reserved": max((s["reserved"] for s in steps if "reserved" in s), default=None),
        "tokens_per_second": statistics.median(
            sum(workload.lengths(step["number"])) / step["seconds"] for step in steps
        ),
        "mfu_train": statistics.median(
            f["train"] / (job.flops * step["phases"]["train"]) for f, step in zip(flops, steps, strict=True)
        ),
        "mfu_step": statistics.median(
            sum(f.values()) / (job.flops * step["seconds"]) for f, step in zip(flops, steps, strict=True)
        ),
        "steps": steps,
    }


def _options(job: Job, workload: Workload) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig

    options: dict[str, Any] = {}
    if job.name in ("trl_best", "trl_continuous"):
        options["per_device_train_batch_size"] = MICRO_BATCH[workload.name]
    if job.name == "trl_continuous":
        settings = continuous_batching(workload)
        if job.device == "cuda":
            settings |= CONTINUOUS_ON_GPU
            del settings["use_async_batching"]
            pages = -(-(workload.prompt_tokens + workload.longest) // settings["page_size"]) + 1
            settings["num_blocks"] = pages * workload.completions
        if not hasattr(ContinuousBatchingConfig(), "page_size"):  # its name in transformers 5.17
            settings["block_size"] = settings.pop("page_size")
        options["transformers_continuous_batching_config"] = settings
    return options


def _flops(shape: str, workload: Workload, number: int) -> dict[str, int]:
    size = size_of(models.config(shape).to_dict())
    groups = workload.grouped(workload.lengths(number))
    return minimum_flops(size, workload.prompt_tokens, groups, workload.signals())


def _phases(steps: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step["phases"]))
