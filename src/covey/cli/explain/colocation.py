"""What `covey explain` says about vLLM in the trainer's process: its memory, how that was worked out, and its sleep."""

from typing import Any

import psutil
import torch

from covey.sizing.memory import MemoryEstimate, readable
from covey.sizing.vllm_memory import DoesNotFit, EngineMemory, cpu_cache_bytes, utilization


def gpu_bytes() -> int | None:
    """Memory of this machine's first GPU, if it has one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def colocation(memory: MemoryEstimate, engine: EngineMemory, args: Any, gpu: int | None) -> list[str]:
    """Paragraphs about vLLM's part of the memory.

    Args:
        memory: the run's estimate.
        engine: what vLLM would keep.
        args: the config.
        gpu: bytes of a GPU; None where there is none.
    """
    if gpu is None and args.device.type == "cpu":
        return [_on_cpu(engine)]
    return [_share(memory, engine, args, gpu), _sleep(args), *_hand_over(args)]


def _on_cpu(engine: EngineMemory) -> str:
    cache = cpu_cache_bytes(engine, psutil.virtual_memory().available)
    return (
        f"vLLM adds a copy of the weights ({readable(engine.weights)}) and, on this CPU, a cache of {readable(cache)}:"
        f" all completions at once need {readable(engine.cache)}, and it takes a quarter of the free memory at most."
        " VLLM_CPU_KVCACHE_SPACE=<GiB> in the environment sets it. For a GPU that is not here, give --gpu_memory <GiB>."
    )


def _share(memory: MemoryEstimate, engine: EngineMemory, args: Any, gpu: int | None) -> str:
    share = args.vllm_gpu_memory_utilization
    if gpu is None:
        return "vLLM's share of the memory cannot be worked out without a GPU; give --gpu_memory <GiB>."
    if share == "auto":
        try:
            return utilization(memory, engine, args, gpu).sentence()
        except DoesNotFit as problem:
            return f"This will fail: {problem}"
    given = int(share * gpu)
    verdict = "" if given >= engine.least else " That is too little for a single completion."
    try:
        auto = f" 'auto' would be {utilization(memory, engine, args, gpu).share:.2f}."
    except DoesNotFit:
        auto = " By this estimate no share would do: see what 'auto' says."
    return (
        f"vLLM takes {readable(given)} (vllm_gpu_memory_utilization={share:g} of {readable(gpu)}); it has use for"
        f" {readable(engine.wanted)}.{verdict}{auto}"
    )


def _sleep(args: Any) -> str:
    if not args.vllm_enable_sleep_mode:
        return "vLLM stays awake: it keeps its share while the policy trains. vllm_enable_sleep_mode=True takes turns."
    kept = (
        "its weights wait in host memory"
        if args.vllm_sleep_level == 1
        else "its weights are forgotten and handed over anew at each waking"
    )
    return f"vLLM sleeps while the policy trains (vllm_sleep_level={args.vllm_sleep_level}): {kept}."


def _hand_over(args: Any) -> list[str]:
    moved = [name for name in ("model", "optimizer") if getattr(args, f"offload_{name}")]
    lines = []
    if moved:
        lines.append(
            f"While vLLM samples, {' and '.join('the ' + name for name in moved)} wait in host memory; each generation"
            " pays for moving them twice."
        )
    return lines
