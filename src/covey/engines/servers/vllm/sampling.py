"""How a vLLM server is told to sample, on whichever of its routes, and what its answers say."""

from typing import Any

from covey.core.engine import SampleRequest
from covey.core.rollout import Completion, FinishReason
from covey.engines.servers.errors import BadAnswer, ServerError
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import SampledChunk

OURS = frozenset(
    {
        "add_special_tokens",
        "best_of",
        "echo",
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "model",
        "n",
        "prompt",
        "prompt_embeds",
        "return_token_ids",
        "seed",
        "stream",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
"""Parts of a request that are not the user's to set."""

FINISHES = {"stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH}

ABORTED = "abort"


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


def refuse_ours(extra: dict[str, Any]) -> None:
    """Settings that requests decide themselves.

    Raises:
        ValueError: `extra` holds one.
    """
    if taken := sorted(OURS & extra.keys()):
        raise ValueError(
            f"generation_kwargs={dict.fromkeys(taken, '...')} would break how completions are asked for: leave out"
            f" {', '.join(taken)}."
        )


def completions_of(server: ServerClient, answer: dict[str, Any]) -> list[SampledChunk]:
    """The choices of a completions answer, in order.

    Raises:
        BadAnswer: one is incomplete.
        ServerError: the engine behind the server failed.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer(server.url, "generate", f"it answered {answer!r:.200} where choices belong")
    try:
        return [_sampled(server, choice) for choice in sorted(choices, key=lambda choice: choice["index"])]
    except (KeyError, TypeError, AttributeError) as error:
        said = f"a choice of its answer is incomplete ({type(error).__name__}: {error}): {choices!r:.300}"
        raise BadAnswer(server.url, "generate", said) from error


def _sampled(server: ServerClient, choice: dict[str, Any]) -> SampledChunk:
    tokens, logprobs, finish = choice.get("token_ids"), choice.get("logprobs"), choice["finish_reason"]
    if tokens is None and finish != ABORTED:
        hint = "Update the server: token ids come with recent releases of vLLM."
        raise BadAnswer(server.url, "generate", "it returns no token ids although return_token_ids was set", hint)
    if finish not in FINISHES and finish != ABORTED:
        raise ServerError(server.url, "generate", f"a completion ended with finish_reason={finish!r}")
    tokens = list(tokens or [])
    reported = None if logprobs is None else list(logprobs["token_logprobs"])
    if not tokens:
        reported = []
    completion = Completion(tokens, reported, FINISHES.get(finish, FinishReason.LENGTH))
    return SampledChunk(completion, aborted=finish == ABORTED)
