"""Figures of `covey explain`: tables of memory, of vLLM's share of it, and of a step's operations, traffic and time."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.cli.explain.run import ExplainedRun
from covey.config.optimizers import STOCHASTIC, name_of
from covey.core.findings import Finding
from covey.observability.record_files import FOLDER, MEASURED, read_run
from covey.runtime.process_memory import available_memory, total_memory
from covey.sizing.memory import MemoryEstimate, ShardCounts, cache_bytes_per_token, readable
from covey.sizing.step_cost import MACHINES, ModelSize, StepTimes, step_costs, step_times
from covey.sizing.vllm_memory import DoesNotFit, EngineMemory, cpu_cache_bytes, utilization


def memory(run: ExplainedRun) -> Iterator[str]:
    """Bytes by part, the peak, and advice on the largest part."""
    m, args = run.memory, run.args
    if m is None:
        yield f"No estimate: {run.model.missing}."
        return
    trained = f", {m.trainable:,} of them trained" if m.trainable != m.parameters else ""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else "the type of the weights"
    yield f"""{m.parameters:,} parameters{trained}; computing in {precision}. Per process, {_sharding(run)}, completions
    of full length:"""
    parts = {"weights": m.weights, "reference model": m.reference, "gradients": m.gradients, "optimizer": m.optimizer}
    parts |= {"activations": m.activations, "logits": m.logits + m.head_gradient + m.late_gradient}
    others = {"encoder": m.encoder, "gaps between": m.gaps, "weights' casts": m.casts, "unpacked weight": m.unpacked}
    others |= {"gathered layers": m.gathered, "gathered copy": m.copy, "opponents": m.opponents}
    others |= {"teachers": m.teachers, "teacher states": m.teacher_states}
    others |= {"weights as sent": m.sent, "routes": m.routes}
    parts |= {name: size for name, size in others.items() if size}
    if not args.samples_elsewhere:
        parts |= {"KV cache": m.kv_cache, "packed weights": m.packed}
    yield from (f"{name:<16}{readable(size):>12}" for name, size in parts.items())
    yield from run.model.notes
    if args.gradient_checkpointing:
        yield _recomputation(m)
    yield f"""Training needs about {readable(m.training)}, sampling {readable(m.sampling)}; they take turns, so the peak
    is about {readable(m.peak)}."""
    yield from _rounding(run, m)
    if found := _measured(run):
        yield f"""A run with these settings has been measured in its first step: at most
        {readable(found["peak_bytes"])}, and {found["seconds"]:.1f} seconds. That counts rather than the estimate."""
    yield _largest_part(m, bool(args.gradient_checkpointing))
    if run.engine is not None:
        yield from _colocated_vllm(run, m, run.engine)


def _rounding(run: ExplainedRun, m: MemoryEstimate) -> Iterator[str]:
    """The weights that an update can move, where whole weights are held in half precision.

    A number in [2^(e-1), 2^e) of a format with d digits is 2^(e-d) from the next one, and moves by at least half of it.
    """
    name, rate = name_of(run.args), run.args.learning_rate
    if m.stored_bytes != 2 or run.model.peft is not None or not rate:
        return
    if name == STOCHASTIC:
        yield """Trained weights are held in bfloat16 and rounded up or down by chance (optim=adamw_stochastic): no
        update is lost in the mean."""
        return
    kwargs: Any = run.args.model_init_kwargs or {}  # a config parses JSON
    held = str(kwargs.get("dtype")).removeprefix("torch.")
    digits = 11 if held == "float16" else 8
    largest = 2.0 ** (math.floor(math.log2(rate)) + digits + 1)
    yield f"""Trained weights are held in half precision: an update of learning_rate={rate:g} is rounded away from
    weights of {largest:.2g} or more. updates/weights_moved is the share that a step changes; float32 weights, an
    adapter or optim=adamw_stochastic lose nothing."""


LENGTH_OF_RUN = ("max_steps", "num_train_epochs", "seed", "data_seed")
"""Settings that change neither memory nor the time of a step."""


def _measured(run: ExplainedRun) -> dict[str, Any] | None:
    """Figures of the first step of the run in `output_dir`, if it had these settings and was on this machine."""
    folder = Path(run.args.output_dir or ".")
    if run.cluster is not None:
        return None
    with suppress(OSError, ValueError):
        described = read_run(folder)
        found: dict[str, Any] = json.loads((folder / FOLDER / MEASURED).read_text())
        now = {name: repr(value) for name, value in run.args.to_dict().items()}
        sized = {name: text for name, text in described["settings"].items() if name not in LENGTH_OF_RUN}
        same = all(now.get(name) == text for name, text in sized.items())
        return (
            found if same and described["model"]["path"] == getattr(run.model.config, "_name_or_path", None) else None
        )
    return None


def fit(run: ExplainedRun) -> Iterator[Finding]:
    """The estimate of `covey explain` against the memory that there is, and settings with which it is less."""
    needed, machine = run.memory, run.cluster.machine if run.cluster else None
    if needed is None:
        return
    whole = int(MACHINES[machine].memory) if machine else run.gpu or total_memory()
    if needed.peak < 0.9 * whole:
        return
    fix = "Take a smaller model, train an adapter (peft), or shard the run over more GPUs."
    tried: dict[str, Any] = {}
    for changes in _smaller(run.args):
        tried |= changes
        shown = ", ".join(f"{name}={value}" for name, value in tried.items())
        fixed = replace(run, args=run.args.with_changes(**tried)).memory or needed
        if fixed.peak < 0.7 * whole:
            fix = f"Set {shown}."
            break
    yield Finding(
        "memory",
        "error",
        f"the run needs about {readable(needed.peak)} (training {readable(needed.training)}, sampling"
        f" {readable(needed.sampling)}), and there are {readable(whole)}.",
        fix,
        f"With {shown} the estimate is {readable(fixed.peak)}.",
    )


def _smaller(args: Any) -> Iterator[dict[str, Any]]:
    """Changes that save memory without another result, the cheapest first."""
    yield {"max_tokens_per_micro_batch": 4096}
    if not args.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if args.max_concurrent_completions > 8:
        yield {"max_concurrent_completions": 8}
    yield {"logprob_chunk_size": 256, "max_tokens_per_micro_batch": 1024}


def _recomputation(m: MemoryEstimate) -> str:
    """Layers that keep their activations, and those that recompute them."""
    where = f"in a micro-batch of {m.micro_batch_tokens:,} tokens (gradient_checkpointing=True)"
    if not m.kept_layers:
        return f"All {m.layers} layers recompute their activations {where}."
    most = f"The last {m.kept_layers} of {m.layers} layers" if m.kept_layers < m.layers else f"All {m.layers} layers"
    others = "; for the others there is no room, and they recompute theirs" * (m.kept_layers < m.layers)
    return f"{most} keep their activations {where}{others}."


def _sharding(run: ExplainedRun) -> str:
    over = run.cluster.spread if run.cluster else ShardCounts()
    parts = [name for name in ("weights", "gradients", "optimizer") if getattr(over, name) > 1]
    return f"{', '.join(parts)} sharded over {over.processes} processes ({over.name})" if parts else "nothing sharded"


def _largest_part(m: MemoryEstimate, checkpointing: bool) -> str:
    weights = "model_init_kwargs with dtype=bfloat16"
    if m.unpacked:
        weights = "--accelerate_config fsdp2, or a smaller model"
    elif m.stored_bytes < 4:
        weights = "--accelerate_config fsdp2, or quantization with peft"
    activations = "max_tokens_per_micro_batch" + ("" if checkpointing else " or gradient_checkpointing=True")
    parts = (
        (m.activations, "activations", activations),
        (m.logits, "logits", "logprob_chunk_size"),
        (m.kv_cache, "KV cache", "max_concurrent_completions"),
        (m.optimizer, "optimizer", "peft, or an 8-bit optim"),
        (m.weights, "weights", weights),
        (m.reference, "reference model", "beta=0 or peft"),
        (m.teachers, "teachers", "teacher_model_init_kwargs with a dtype or quantization_config, or a server"),
        (m.gradients, "gradients", "peft"),
    )
    _, name, advice = max(parts, key=lambda part: part[0])
    return f"The largest part is the {name}; to shrink it: {advice}."


def _colocated_vllm(run: ExplainedRun, memory: MemoryEstimate, engine: EngineMemory) -> Iterator[str]:
    args = run.args
    if run.gpu is None and run.device == "cpu":
        cache = cpu_cache_bytes(engine, available_memory())
        yield f"""vLLM adds a copy of the weights ({readable(engine.weights)}) and, on this CPU, a cache of
        {readable(cache)}: all completions at once need {readable(engine.cache)}, and it takes a quarter of the free
        memory at most. VLLM_CPU_KVCACHE_SPACE=<GiB> in the environment sets it. For a GPU of another machine, give
        --gpu_memory <GiB>."""
        return
    yield _vllm_share(run, memory, engine)
    if not args.vllm_enable_sleep_mode:
        yield """vLLM stays awake: it holds its share while the policy trains. With vllm_enable_sleep_mode=True they
        take turns."""
    else:
        place = "wait in host memory" if args.vllm_sleep_level == 1 else "are discarded and sent again at each waking"
        yield f"vLLM sleeps while the policy trains (vllm_sleep_level={args.vllm_sleep_level}): its weights {place}."
    moved = [f"the {name}" for name in ("model", "optimizer") if getattr(args, f"offload_{name}")]
    if moved:
        yield f"While vLLM samples, {' and '.join(moved)} wait in host memory; each rollout batch moves them twice."


def _vllm_share(run: ExplainedRun, memory: MemoryEstimate, engine: EngineMemory) -> str:
    share, gpu = run.args.vllm_gpu_memory_utilization, run.gpu
    if gpu is None:
        return "vLLM's share of the memory cannot be worked out without a GPU; give --gpu_memory <GiB>."
    try:
        auto, sentence = utilization(memory, engine, run.args, gpu)
        text = f"'auto' would be {auto:.2f}."
        if share == "auto":
            return sentence
    except DoesNotFit as problem:
        text = "By this estimate no share is enough: see the message for 'auto'."
        if share == "auto":
            return f"This will fail: {problem}"
    assert isinstance(share, float), "a rule refuses other text"
    given = int(share * gpu)
    too_little = "" if given >= engine.least else " That is too little for a single completion."
    return f"""vLLM takes {readable(given)} (vllm_gpu_memory_utilization={share:g} of {readable(gpu)}) and can use
    {readable(engine.wanted)}.{too_little} {text}"""


def communication(run: ExplainedRun) -> Iterator[str]:
    """Operations, traffic and, on a known GPU, time of an optimizer step; only if processes or a GPU are named."""
    cluster, memory, args = run.cluster, run.memory, run.args
    if memory is None or cluster is None or args.max_completion_length is None:
        return
    config, spread = run.model.config, cluster.spread
    prompt_tokens = run.prompt_tokens + run.model.images.tokens
    adapter = run.model.peft is not None
    step = step_costs(config, args, memory, spread, prompt_tokens=prompt_tokens, adapter=adapter)
    scoring = f"{step.scoring_flops:.2e} to score, " if step.scoring_flops else ""
    several = "es" * (memory.micro_batches != 1)
    yield f"""One optimizer step, all {spread.processes} processes, full completions: {step.training_flops:.2e}
    operations to train in {memory.micro_batches} micro-batch{several} of {memory.micro_batch_tokens:,} tokens,
    {scoring}{step.sampling_flops:.2e} to sample {step.sampled_tokens:,} tokens."""
    parts = {"gather weights": step.gathered, "add up gradients": step.reduced, "after the update": step.refreshed}
    parts |= {"gather for sync": step.sync_gathered, "send to server": step.sync_sent}
    if table := [f"{name:<20}{readable(size):>12}" for name, size in parts.items() if size]:
        yield from ("Each process receives (the first one sends the last):", *table)
    if cluster.machine is not None:
        text = config.get_text_config()
        times = step_times(
            step,
            memory,
            ModelSize.of(text),
            MACHINES[cluster.machine],
            spread,
            cache_bytes=cache_bytes_per_token(text, memory.computed_bytes),
            prompt_tokens=prompt_tokens,
            gpus_of_node=cluster.gpus_of_node,
            sampling_gpus=cluster.gpus_of_node if args.samples_elsewhere else None,
            overlaps=bool(args.max_staleness),
        )
        yield from _seconds(times, cluster.machine)


def _seconds(times: StepTimes, machine: str) -> Iterator[str]:
    figures = MACHINES[machine]
    order = "sampling during training" if times.overlaps else "sampling and training in turns"
    yield f"""On {machine} GPUs, at {figures.training:.0%} of their operations in training and {figures.decoding:.0%} of
    their memory's rate in decoding (assumed; measure your own), with {order}:"""
    parts = {"sampling": times.sampling, "training": times.training, "moving in training": times.moving}
    parts |= {"after the update": times.refreshing, "sync": times.sync, "step": times.step}
    yield from (f"{name:<20}{value:>10.1f} s" for name, value in parts.items() if value)
