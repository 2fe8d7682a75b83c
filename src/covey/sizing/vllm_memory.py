"""Memory of vLLM in the trainer's process: the arithmetic behind `vllm_gpu_memory_utilization="auto"`."""

import math
from dataclasses import dataclass
from typing import Any

from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, MemoryEstimate, cache_bytes_per_token, readable

GIB = 1024**3

SPARE = 0.05  # share of a GPU that is left free: fragmentation, CUDA graphs, collectives' buffers
CONTEXT = GIB  # memory of CUDA itself and its libraries

BATCHED_TOKENS, BATCHED_SEQUENCES = 8192, 256
"""vLLM's defaults: tokens of one forward pass, and sequences whose logits it holds."""

CPU_SHARE = 0.25  # largest share of a machine's free memory for vLLM's cache on a CPU


class DoesNotFit(ValueError):
    """No share of the GPU's memory is enough for this run."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of vLLM in one process."""

    weights: int  # its copy, split over `vllm_tensor_parallel_size` processes
    working: int  # activations of `BATCHED_TOKENS` tokens and logits of `BATCHED_SEQUENCES` sequences
    cache: int  # keys and values of all completions that this process samples at a time, at full length
    smallest_cache: int  # keys and values of a single completion

    @property
    def wanted(self) -> int:
        """Bytes with which all completions decode at once; more would be idle."""
        return self.weights + self.working + self.cache

    @property
    def least(self) -> int:
        """Bytes for decoding a single completion."""
        return self.weights + self.working + self.smallest_cache


def engine_memory(
    memory: MemoryEstimate, config: Any, args: Any, prompt_tokens: int = ASSUMED_PROMPT_TOKENS
) -> EngineMemory:
    text, number = config.get_text_config(), memory.computed_bytes
    context = args.vllm_max_model_length or text.max_position_embeddings
    tokens = min(args.max_completion_length or context, max(context - prompt_tokens, 1))  # of the longest completion
    completions = args.per_device_train_batch_size * args.steps_per_generation
    cached = completions * tokens + -(-completions // args.num_generations) * prompt_tokens
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = BATCHED_TOKENS * (4 * text.hidden_size + 2 * inner) * number
    token_bytes, shards = cache_bytes_per_token(text, number), args.vllm_tensor_parallel_size
    return EngineMemory(
        weights=memory.parameters * number // shards,
        working=activations + 2 * BATCHED_SEQUENCES * text.vocab_size * 4,
        cache=cached * token_bytes,
        smallest_cache=(args.vllm_max_model_length or tokens + prompt_tokens) * token_bytes // shards,
    )


def usable(gpu: int) -> int:
    """Usable bytes of a GPU: without the spare share and CUDA's own memory."""
    return int(gpu * (1 - SPARE)) - CONTEXT


def utilization(memory: MemoryEstimate, engine: EngineMemory, args: Any, gpu: int) -> tuple[float, str]:
    """vLLM's share of a GPU, rounded to hundredths, and an explanation for users; DoesNotFit if no share is enough.

    Without sleep mode vLLM holds its share while the policy trains, in addition to training's peak. With sleep mode the
    two alternate, and only weights, reference and optimizer are on the GPU while vLLM samples, without those moved to
    host memory. While new weights are sent, nothing has been moved yet, but there is no cache either.
    """
    occupied, occupied_by = _occupied(memory, args)
    free = usable(gpu) - occupied
    free_in_sync = usable(gpu) - memory.resident - engine.weights if args.vllm_enable_sleep_mode else 0
    share = min(math.ceil(100 * engine.wanted / gpu), math.floor(100 * free / gpu)) / 100
    if share * gpu < engine.least or free_in_sync < 0:
        missing = (engine.least - share * gpu) if free_in_sync >= 0 else -free_in_sync
        raise DoesNotFit(
            f"vllm_gpu_memory_utilization='auto': of {readable(gpu)}, {readable(occupied)} are taken by {occupied_by},"
            f" and vLLM needs at least {readable(engine.least)}; {readable(int(missing))} are missing."
            f" {_advice(memory, args)}"
        )
    bound = "all of it" if engine.wanted <= free else f"of which {readable(free)} are free, so some must wait"
    sentence = (
        f"vllm_gpu_memory_utilization=auto is {share:.2f} of {readable(gpu)}: {readable(occupied)} are taken by"
        f" {occupied_by}; vLLM can use {readable(engine.wanted)} ({readable(engine.weights)} weights,"
        f" {readable(engine.working)} to work with, {readable(engine.cache)} for the keys and values of all completions"
        f" at once), {bound}."
    )
    return share, sentence


def _occupied(memory: MemoryEstimate, args: Any) -> tuple[int, str]:
    """Bytes of everything except vLLM while it holds its share, and their description."""
    if not args.vllm_enable_sleep_mode:
        return memory.training, "training, during which vLLM stays awake"
    moved = {"policy": memory.weights} if args.offload_model else {}
    moved |= {"optimizer": memory.optimizer} if args.offload_optimizer else {}
    rest = "weights, reference and optimizer, which stay while vLLM is awake"
    rest += f", the {' and '.join(moved)} being in host memory" if moved else ""
    return memory.resident - sum(moved.values()), rest


def _advice(memory: MemoryEstimate, args: Any) -> str:
    advice = ""
    if not args.vllm_enable_sleep_mode:
        advice = "set vllm_enable_sleep_mode=True, so that vLLM and training take turns, "
    elif not args.offload_optimizer and memory.optimizer:
        advice = "set offload_optimizer=True, "
    elif not args.offload_model:
        advice = "set offload_model=True, "
    adapter = "train an adapter (peft), " if memory.trainable == memory.parameters else ""
    advice += f"split vLLM's model over GPUs (vllm_tensor_parallel_size), {adapter}or run vLLM as a server"
    return f"{advice[0].upper()}{advice[1:]} (vllm_mode='server')."


def cpu_cache_bytes(engine: EngineMemory, free: int) -> int:
    """Bytes of vLLM's cache on a CPU: for all completions, at most `CPU_SHARE`, at least for one."""
    return max(min(engine.cache, int(free * CPU_SHARE)), engine.smallest_cache, 64 * 1024**2)
