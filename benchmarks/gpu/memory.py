"""Memory: the plan against what training takes, and the largest micro-batch that fits, Covey's and TRL's."""

import copy
import warnings
from dataclasses import asdict
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.jobs import Job, free_memory
from benchmarks.gpu.training import Run
from benchmarks.workloads import Workload

LORA = {"r": 16, "target_modules": "all-linear"}
PLANNED: dict[str, dict[str, Any]] = {
    "0.5B full": {"shape": "Qwen2.5-0.5B"},
    "0.5B full, no checkpointing": {"shape": "Qwen2.5-0.5B", "gradient_checkpointing": False},
    "1.5B full": {"shape": "Qwen2.5-1.5B"},
    "1.5B LoRA": {"shape": "Qwen2.5-1.5B", "peft": LORA},
    "7B LoRA, bf16 weights": {"shape": "Qwen2.5-7B", "peft": LORA, "dtype": "bfloat16"},
    "0.5B with a reference": {"shape": "Qwen2.5-0.5B", "beta": 0.04},
}
"""Options of each run; `shape`, `peft` and `dtype` are those of the model."""

WORKLOAD = Workload("plan", 256, 8, 8, 256)
TINY = Workload("plan", 8, 2, 2, 4)
LARGEST = ("covey", "trl")
NEEDS = {"largest, trl": ["trl"]}
FIRST, LAST = 8, 1024
"""Rollouts of the first micro-batch that is tried for its size, and of the last."""


def jobs(quick: bool) -> dict[str, list[str]]:
    """Every run begins with an empty device, so each has a process."""
    planned = ["0.5B full", "1.5B LoRA", "7B LoRA, bf16 weights"] if quick else list(PLANNED)
    return {name: ["plan"] for name in planned} | {f"largest, {library}": ["micro-batch"] for library in LARGEST}


def measure(job: Job, case: str) -> dict[str, Any]:
    """A job's only case."""
    return _planned(job) if case == "plan" else _largest(job, job.name.removeprefix("largest, "))


# ---- the plan --------------------------------------------------------------------------------------------------------


def _planned(job: Job) -> dict[str, Any]:
    """Predicted and measured bytes of a step's peak; on a CPU nothing is measured."""
    import torch

    options = dict(PLANNED[job.name])
    shape, peft = options.pop("shape"), options.pop("peft", None)
    dtype = getattr(torch, options.pop("dtype", "float32"))
    shape, workload = ("tiny", TINY) if job.quick else (shape, WORKLOAD)
    run = Run("covey", workload, shape, job.output, options | _adapter(peft), job.device, dtype)
    steps = run.steps(1)
    predicted = _predicted(run.trainer.args, shape, workload, peft, dtype, job.device)
    measured = max((step["peak"] for step in steps if "peak" in step), default=None)
    return {
        "options": {"shape": shape, **options},
        "predicted": predicted["peak"],
        "measured": measured,
        "off": predicted["peak"] / measured - 1 if measured else None,
        "reserved": max((step["reserved"] for step in steps if "reserved" in step), default=None),
        "parts": predicted,
        "steps": steps,
    }


def _adapter(peft: dict[str, Any] | None) -> dict[str, Any]:
    from covey.cli.train import adapter

    return {"peft_config": adapter(peft)} if peft else {}


def _predicted(args: Any, shape: str, workload: Workload, peft: Any, dtype: Any, device: str) -> dict[str, Any]:
    from covey.sizing.memory import available_bytes, estimate

    args = copy.copy(args)
    args.model_init_kwargs = {"dtype": dtype}  # the trainer was given a model
    given = {"peft": peft, "device": device, "device_bytes": available_bytes(args)}
    m = estimate(models.config(shape), args, prompt_tokens=workload.prompt_tokens, **given)
    return {**asdict(m), "training": m.training, "sampling": m.sampling, "peak": m.peak}


# ---- the largest micro-batch -----------------------------------------------------------------------------------------


def _largest(job: Job, library: str) -> dict[str, Any]:
    """Double a micro-batch until a step no longer fits into memory, or has to be split."""
    from covey.runtime.process_memory import is_out_of_memory

    tried = []
    size = FIRST
    while size <= (2 * FIRST if job.quick else LAST):
        try:
            tried.append({"rollouts": size, **_fitting(job, library, size)})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            tried.append({"rollouts": size, "fits": False})
        free_memory(job.device)
        if not tried[-1]["fits"]:
            break
        size *= 2
    return {"largest": max((one["rollouts"] for one in tried if one["fits"]), default=0), "tried": tried}


def _fitting(job: Job, library: str, size: int) -> dict[str, Any]:
    tiny = TINY.group_size
    usual = Workload("fit", 256, size // 8, 8, 128) if not job.quick else Workload("fit", 8, size // tiny, tiny, 4)
    options: dict[str, Any] = {"gradient_checkpointing": False, "per_device_train_batch_size": size}
    if library == "covey":  # one pass, as in TRL
        options["max_tokens_per_micro_batch"] = size * (usual.prompt_tokens + usual.completion_tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(library, usual, job.shape, job.output, options, job.device)
        *_, step = run.steps(1)
    split = any("memory ran out" in str(warning.message) for warning in caught)
    return {"fits": not split, "seconds": step["seconds"], "peak": step.get("peak")}
