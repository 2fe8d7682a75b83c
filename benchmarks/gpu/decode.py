"""Sampling alone: the built-in engine and transformers' `generate`, against the time that reading memory takes."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.flops import size_of
from benchmarks.gpu import models
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.timing import synchronize

GROUP = 8
TURNS = 3


def jobs(quick: bool) -> dict[str, list[str]]:
    """Cases are sequences at once: with float32 weights under autocast, as in training, or with bf16 weights."""
    if quick:
        return {"native": ["8"], "generate": ["8"]}
    return {"native": ["16", "64", "256", "64, bf16 weights"], "generate": ["64", "64, bf16 weights"]}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Sample equally long completions, without an end token.

    Returns:
        `seconds` of all tokens, prompts included; `ms_per_step` of the later steps alone, from the difference to a
        shorter run; `bandwidth_share`: bytes of bf16 weights and of keys and values that steps have to read, each
        group's prompt once, over what a copy could have moved in `seconds`.
    """
    import torch

    sequences = int(case.split(",")[0])
    prompt, short, new = (8, 2, 8) if job.quick else (128, 32, 256)
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    model = _model(job.shape, job.device, dtype)
    prompts = _prompts(sequences // GROUP, prompt, model.config.vocab_size)
    sample = {"native": _native, "generate": _generate}[job.name](model, job.device)

    def timed(tokens: int) -> float:
        synchronize(job.device)
        start = time.perf_counter()
        sample(prompts, tokens)
        synchronize(job.device)
        return time.perf_counter() - start

    first = timed(new)
    turns = 1 if job.quick else TURNS
    seconds = statistics.median(timed(new) for _ in range(turns))
    later = (seconds - statistics.median(timed(short) for _ in range(turns))) / (new - short)
    read, read_later = (_bytes_read(model.config, sequences, prompt, since, new) for since in (0, short))
    return {
        "first_seconds": first,
        "seconds": seconds,
        "tokens_per_second": sequences * new / seconds,
        "ms_per_step": 1e3 * seconds / new,
        "bandwidth_share": new * read / (job.bandwidth * seconds),
        "ms_per_later_step": 1e3 * later,
        "bandwidth_share_later": read_later / (job.bandwidth * later) if later > 0 else None,
    }


def _native(model: Any, device: str) -> Callable[[list[list[int]], int], None]:
    from covey.core.engine import SampleRequest, SamplingParams
    from covey.engines.native.engine import NativeEngine

    def sample(prompts: list[list[int]], tokens: int) -> None:
        engine = NativeEngine(
            lambda: model,
            eos_token_ids=set(),
            pad_token_id=0,
            max_sequences=GROUP * len(prompts),
            forward_context=_autocast(device),
        )
        params = SamplingParams(max_tokens=tokens)
        requests = [
            SampleRequest(prompt, GROUP, params, [GROUP * place + i for i in range(GROUP)])
            for place, prompt in enumerate(prompts)
        ]

        async def all_groups() -> list[Any]:
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        with engine.awake():
            done = [len(completion.token_ids) for group in asyncio.run(all_groups()) for completion in group]
        assert done == [tokens] * len(done), done

    return sample


def _generate(model: Any, device: str) -> Callable[[list[list[int]], int], None]:
    import torch
    from transformers import GenerationConfig

    def sample(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)], device=device)
        config = GenerationConfig(
            do_sample=True, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None
        )
        with torch.no_grad(), _autocast(device)():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.shape[1] == ids.shape[1] + tokens, out.shape

    return sample


def _autocast(device: str) -> Callable[[], Any]:
    import torch

    return lambda: torch.autocast(device, dtype=torch.bfloat16)


@cache
def _model(shape: str, device: str, dtype: Any) -> Any:
    model = models.model(shape, device, dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def _prompts(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(3, vocab_size) for _ in range(tokens)] for _ in range(count)]


def _bytes_read(config: Any, sequences: int, prompt: int, since: int, until: int) -> float:
    """Bytes of a mean step between two lengths: weights of layers and head, and all keys and values, in bf16."""
    size = size_of(config.to_dict())
    head = config.hidden_size // config.num_attention_heads
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    cached = sequences // GROUP * prompt + sequences * (since + until) / 2
    return 2 * (size.body + size.head) + token * cached
