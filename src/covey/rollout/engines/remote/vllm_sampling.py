"""How a vLLM server is told to sample, on whichever of its routes."""

from typing import Any

from covey.rollout.engine import SampleRequest


def sampling_settings(request: SampleRequest, ends: frozenset[int]) -> dict[str, Any]:
    """Every setting, or the model's generation config decides; completion i has the seed of the first plus i.

    Args:
        request: whose `params.extra` goes before everything else.
        ends: tokens that end a completion.
    """
    params = request.params
    return {
        "n": request.n,
        "seed": request.seeds[0] % 2**62,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,  # the server's idea of what ends a text; ours is next
        "stop_token_ids": sorted(ends),
        "logprobs": 0,
        **params.extra,
    }
