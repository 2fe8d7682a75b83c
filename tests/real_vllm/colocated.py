"""vLLM in the test's process, over tiny models that vLLM can run."""

import asyncio
from typing import Any

import torch

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import Completion
from covey.engines.vllm_colocate.engine import VllmColocateEngine
from covey.engines.vllm_colocate.process import start_vllm
from tests.support import tiny

WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""vLLM's attention on a CPU takes heads of 32 channels at least."""

END = 1
"""The end token of tiny's tokenizer."""


def model(seed: int = 0, **changes: Any) -> Any:
    return tiny.model(seed, **WIDE, **changes)


def start(folder: Any, **arguments: Any) -> Any:
    """vLLM over the config of a tiny model; its weights are nonsense until some are loaded."""
    tiny.config(**WIDE).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return start_vllm(
        {
            "model": str(folder),
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": -1,
            "logprobs_mode": "raw_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
            **arguments,
        }
    )


def engine(vllm: Any, **arguments: Any) -> VllmColocateEngine:
    return VllmColocateEngine(vllm, eos_token_ids={END}, **arguments)


def request(prompt_ids: list[int], seeds: list[int], max_tokens: int = 16, **params: Any) -> SampleRequest:
    return SampleRequest(prompt_ids, len(seeds), SamplingParams(max_tokens, **params), seeds)


def greedy(policy: Any, prompt_ids: list[int], tokens: int) -> list[int]:
    """What transformers writes, token by token without a cache, up to the end token."""
    ids = list(prompt_ids)
    with torch.no_grad():
        while len(ids) < len(prompt_ids) + tokens and END not in ids[len(prompt_ids) :]:
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def scored(policy: Any, prompt_ids: list[int], completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probs of a completion."""
    ids = torch.tensor([prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = policy(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


def sample(engine: Any, *requests: SampleRequest) -> Any:
    """Completions of requests that are in flight together."""

    async def go():
        with engine.awake():
            return await asyncio.gather(*(engine.generate(each) for each in requests))

    return asyncio.run(go())
