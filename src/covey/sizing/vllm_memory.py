"""How much memory vLLM gets inside the trainer's process: the arithmetic behind `vllm_gpu_memory_utilization="auto"`.

It starts from the estimate that `covey explain` prints (`covey.sizing.memory`), so that a run and its explanation
agree. vLLM's share counts all that vLLM keeps on a GPU: its copy of the weights, its working memory, its key-value
cache. Not here: starting vLLM (`covey.engines.vllm_colocate.process`).
"""

import math
from dataclasses import dataclass
from typing import Any

from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, MemoryEstimate, cache_bytes_per_token, readable

GIB = 1024**3

SPARE = 0.05
"""Share of a GPU that is left alone: fragmentation, CUDA graphs, collectives' buffers."""

CONTEXT = GIB
"""What CUDA itself and its libraries take."""

BATCHED_TOKENS, BATCHED_ROWS = 8192, 256
"""Tokens of one pass of vLLM, and rows whose logits it holds: its defaults."""

CPU_SHARE = 0.25
"""Most of a machine's free memory that vLLM's cache takes on a CPU."""


class DoesNotFit(ValueError):
    """There is no share of the GPU's memory with which this run fits."""


@dataclass(frozen=True)
class EngineMemory:
    """What vLLM keeps in one process, in bytes.

    Attributes:
        weights: its copy of the weights, split over `vllm_tensor_parallel_size` processes.
        working: activations of `BATCHED_TOKENS` tokens and logits of `BATCHED_ROWS` rows.
        cache: keys and values of all completions that this process samples at a time, at full length.
        smallest_cache: keys and values of a single completion.
    """

    weights: int
    working: int
    cache: int
    smallest_cache: int

    @property
    def wanted(self) -> int:
        """With this much every completion decodes at once; more would lie idle."""
        return self.weights + self.working + self.cache

    @property
    def least(self) -> int:
        """With less, not a single completion fits."""
        return self.weights + self.working + self.smallest_cache


@dataclass(frozen=True)
class Utilization:
    """A share of the GPU for vLLM, and where it comes from.

    Attributes:
        share: of the GPU's memory, between 0 and 1, in hundredths: no less than wanted, no more than there is.
        gpu: bytes of the GPU.
        beside: bytes that everything else takes while vLLM holds its share.
        what: what that is, in words.
        engine: what vLLM would like to have.
    """

    share: float
    gpu: int
    beside: int
    what: str
    engine: EngineMemory

    def sentence(self) -> str:
        """How the number came about."""
        engine = self.engine
        free = usable(self.gpu) - self.beside
        bound = "all of it" if engine.wanted <= free else f"of which {readable(free)} are there, so that some must wait"
        return (
            f"vllm_gpu_memory_utilization=auto is {self.share:.2f} of {readable(self.gpu)}: {readable(self.beside)} are"
            f" taken by {self.what}; vLLM has use for {readable(engine.wanted)} ({readable(engine.weights)} weights,"
            f" {readable(engine.working)} to work with, {readable(engine.cache)} for the keys and values of all"
            f" completions at once), {bound}."
        )


def engine_memory(
    memory: MemoryEstimate, config: Any, args: Any, prompt_tokens: int = ASSUMED_PROMPT_TOKENS
) -> EngineMemory:
    """What vLLM would keep in one process.

    Args:
        memory: the run's estimate.
        config: the model's transformers config.
        args: a `GRPOConfig` or `RLOOConfig`.
        prompt_tokens: length of a prompt.
    """
    text = config.get_text_config()
    number = memory.computed_bytes
    tokens = completion_tokens(args, text, prompt_tokens)
    rows = args.per_device_train_batch_size * args.steps_per_generation
    held = rows * tokens + -(-rows // args.num_generations) * prompt_tokens
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    each = cache_bytes_per_token(text, number)
    return EngineMemory(
        weights=memory.parameters * number // args.vllm_tensor_parallel_size,
        working=BATCHED_TOKENS * (4 * text.hidden_size + 2 * inner) * number + 2 * BATCHED_ROWS * text.vocab_size * 4,
        cache=held * each,
        smallest_cache=(args.vllm_max_model_length or tokens + prompt_tokens) * each // args.vllm_tensor_parallel_size,
    )


def completion_tokens(args: Any, text: Any, prompt_tokens: int) -> int:
    """Longest completion there can be."""
    context = args.vllm_max_model_length or text.max_position_embeddings
    return min(args.max_completion_length or context, max(context - prompt_tokens, 1))


def usable(gpu: int) -> int:
    """Bytes of a GPU that a run can plan with."""
    return int(gpu * (1 - SPARE)) - CONTEXT


def utilization(memory: MemoryEstimate, engine: EngineMemory, args: Any, gpu: int) -> Utilization:
    """The share of a GPU that vLLM gets.

    Without sleep mode vLLM keeps its share while the policy trains, so training's peak has to fit beside it. With it,
    the two take turns, and only what lies there while sampling has to: weights, reference and optimizer, less what is
    moved to host memory. While new weights are handed over nothing has moved yet, but there is no cache either.

    Raises:
        DoesNotFit: not a single completion would fit; the message says what would help.
    """
    beside, what = _beside(memory, args)
    free = usable(gpu) - beside
    handing_over = usable(gpu) - memory.resident - engine.weights if args.vllm_enable_sleep_mode else 0
    share = min(math.ceil(100 * engine.wanted / gpu), math.floor(100 * free / gpu)) / 100
    if share * gpu < engine.least or handing_over < 0:
        short = (engine.least - share * gpu) if handing_over >= 0 else -handing_over
        raise DoesNotFit(
            f"vllm_gpu_memory_utilization='auto': of {readable(gpu)}, {readable(beside)} are taken by {what}, and vLLM"
            f" needs at least {readable(engine.least)}; {readable(int(short))} are missing. {_advice(memory, args)}"
        )
    return Utilization(share, gpu, beside, what, engine)


def _beside(memory: MemoryEstimate, args: Any) -> tuple[int, str]:
    if not args.vllm_enable_sleep_mode:
        return memory.training, "training, which vLLM stays awake beside"
    moved = memory.weights * args.offload_model + memory.optimizer * args.offload_optimizer
    away = " and ".join(
        name for name, gone in (("policy", args.offload_model), ("optimizer", args.offload_optimizer)) if gone
    )
    what = "weights, reference and optimizer, which stay while vLLM is awake"
    return memory.resident - moved, what + (f", the {away} being in host memory" if away else "")


def _advice(memory: MemoryEstimate, args: Any) -> str:
    ways = []
    if not args.vllm_enable_sleep_mode:
        ways.append("set vllm_enable_sleep_mode=True, so that vLLM and training take turns")
    elif not args.offload_optimizer and memory.optimizer:
        ways.append("set offload_optimizer=True")
    elif not args.offload_model:
        ways.append("set offload_model=True")
    ways.append("split vLLM's model over GPUs (vllm_tensor_parallel_size)")
    if memory.trainable == memory.parameters:
        ways.append("train an adapter (peft)")
    ways.append("or run vLLM as a server (vllm_mode='server')")
    text = ", ".join(ways)
    return text[0].upper() + text[1:] + "."


def cpu_cache_bytes(engine: EngineMemory, free: int) -> int:
    """Bytes of vLLM's cache on a CPU: room for all completions at once, within `CPU_SHARE` of what is free.

    Never less than one completion needs, as vLLM would not start.
    """
    return max(min(engine.cache, int(free * CPU_SHARE)), engine.smallest_cache, 64 * 1024**2)
