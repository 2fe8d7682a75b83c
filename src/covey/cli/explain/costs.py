"""The lines of `covey explain` on many processes: what each of them receives in a step, and how long a step takes."""

from typing import Any

from covey.sizing.memory import MemoryEstimate, ShardCounts, cache_bytes_per_token, readable
from covey.sizing.step_cost import MACHINES, ModelSize, StepCosts, StepTimes, step_costs, step_times


def costs(
    config: Any,
    args: Any,
    memory: MemoryEstimate,
    spread: ShardCounts,
    *,
    prompt_tokens: int,
    adapter: bool,
    machine: str | None = None,
    gpus_of_node: int = 8,
) -> list[str]:
    """One optimizer step: operations, bytes and, for a known GPU, seconds.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        memory: its estimate, with the same spread.
        spread: over processes.
        prompt_tokens: length of a prompt.
        adapter: an adapter is trained, not the model.
        machine: a key of `MACHINES`; None: no seconds.
        gpus_of_node: GPUs of a machine, also of the one that samples.
    """
    step = step_costs(config, args, memory, spread, prompt_tokens=prompt_tokens, adapter=adapter)
    scoring = f"{step.scoring_flops:.2e} to score, " if step.scoring_flops else ""
    lines = [
        f"One optimizer step, all {spread.processes} processes, full completions: {step.training_flops:.2e} operations "
        f"to train in {step.passes} pass{'es' * (step.passes != 1)} of {memory.pass_tokens:,} tokens each, {scoring}"
        f"{step.sampling_flops:.2e} to sample {step.sampled_tokens:,} tokens.",
        *_sent(step),
    ]
    if machine is not None:
        size, each = ModelSize.of(config.get_text_config()), memory.computed_bytes
        times = step_times(
            step,
            memory,
            size,
            MACHINES[machine],
            spread,
            cache_bytes=cache_bytes_per_token(config.get_text_config(), each),
            prompt_tokens=prompt_tokens,
            gpus_of_node=gpus_of_node,
            sampling_gpus=gpus_of_node if args.samples_elsewhere else None,
            overlaps=bool(args.max_staleness),
        )
        lines += _seconds(times, machine)
    return lines


def _sent(step: StepCosts) -> list[str]:
    parts = {
        "gather weights": step.gathered,
        "add up gradients": step.reduced,
        "after the update": step.refreshed,
        "gather for sync": step.sync_gathered,
        "send to server": step.sync_sent,
    }
    table = [f"{name:<20}{readable(size):>12}" for name, size in parts.items() if size]
    return ["Each process receives (the first one sends the last):", *table] if table else []


def _seconds(times: StepTimes, machine: str) -> list[str]:
    figures = MACHINES[machine]
    parts = {
        "sampling": times.sampling,
        "passes": times.training,
        "moving in passes": times.moving,
        "after the update": times.refreshing,
        "sync": times.sync,
        "step": times.step,
    }
    how = "sampling beside training" if times.overlaps else "sampling and training in turns"
    return [
        f"On {machine} GPUs, at {figures.training:.0%} of their operations in passes and {figures.decoding:.0%} of "
        f"their memory's rate in decoding (assumed; measure your own), with {how}:",
        *(f"{name:<20}{value:>10.1f} s" for name, value in parts.items() if value),
    ]
