"""Bodies and answers of vLLM's sampling routes: `/v1/completions`, and `/inference/v1/generate` for images."""

from typing import Any

from covey.core.engine import SampleRequest
from covey.core.records import Completion, FinishReason
from covey.engines.servers.completions import common_settings, sent_ids, sent_images
from covey.engines.servers.errors import BadAnswer, ServerError
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import SampledChunk

RESERVED = frozenset({
    "add_special_tokens", "best_of", "echo", "ignore_eos", "logprobs", "max_tokens", "model", "n", "prompt",
    "prompt_embeds", "return_token_ids", "seed", "stream", "truncate_prompt_tokens", "use_beam_search",
})  # fmt: skip
"""Parts of a request that users cannot set."""

FINISHES = {"stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH}

ABORTED = "abort"
IMAGE_ROUTE = "/inference/v1/generate"  # route for prompts with images, which the completions route does not take
TEXT = ("stop", "bad_words")  # settings for which vLLM has to detokenize while it samples


def sampling_settings(request: SampleRequest, ends: frozenset[int]) -> dict[str, Any]:
    """All sampling settings; completion i has the seed of the first plus i, and `params.extra` takes precedence."""
    params = request.params
    return {
        "n": request.n,
        "seed": request.seeds[0] % 2**62,
        "max_tokens": params.max_tokens,
        "top_k": params.top_k,
        "ignore_eos": True,  # the model's own; `stop_token_ids` decide
        "logprobs": 0,
        **common_settings(params, ends),
        **params.extra,
    }


def completions_of(server: ServerClient, answer: dict[str, Any]) -> list[SampledChunk]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer(server.url, "generate", f"it answered {answer!r:.200} where choices belong")
    try:
        return [_sampled(server, choice) for choice in sorted(choices, key=lambda choice: choice["index"])]
    except (KeyError, TypeError, AttributeError) as error:
        message = f"a choice of its answer is incomplete ({type(error).__name__}: {error}): {choices!r:.300}"
        raise BadAnswer(server.url, "generate", message) from error


def _sampled(server: ServerClient, choice: dict[str, Any]) -> SampledChunk:
    tokens, logprobs, finish = choice.get("token_ids"), choice.get("logprobs"), choice["finish_reason"]
    if tokens is None and finish != ABORTED:
        hint = "Update the server: token ids come with recent releases of vLLM."
        raise BadAnswer(server.url, "generate", "it returns no token ids although return_token_ids was set", hint)
    if finish not in FINISHES and finish != ABORTED:
        raise ServerError(server.url, "generate", f"a completion ended with finish_reason={finish!r}")
    tokens = list(tokens or [])
    reported = None
    if not tokens:
        reported = []
    elif logprobs is not None and "content" in logprobs:  # the form of `IMAGE_ROUTE`
        reported = [entry["logprob"] for entry in logprobs["content"] or []]
    elif logprobs is not None:
        reported = list(logprobs["token_logprobs"])
    completion = Completion(tokens, reported, FINISHES.get(finish, FinishReason.LENGTH))
    return SampledChunk(completion, aborted=finish == ABORTED)


def image_request(request: SampleRequest, model: str, ends: frozenset[int]) -> dict[str, Any]:
    settings = sampling_settings(request, ends)
    return {
        "model": model,
        "token_ids": sent_ids(request),
        "content_parts": [{"type": "image_url", "url": url} for url in sent_images(request)],
        "return_token_ids": True,
        "sampling_params": {"detokenize": any(name in settings for name in TEXT), **settings},
    }
