"""Prompts with images, as vLLM takes them: tokens in and tokens out at /inference/v1/generate.

The completions route, which everything else goes to, knows no images. Not here: what is done with the answer.
"""

from typing import Any

from covey.core.engine import SampleRequest
from covey.engines.servers.errors import BadAnswer
from covey.engines.servers.images import sent_ids, sent_images
from covey.engines.servers.vllm.sampling import sampling_settings

ROUTE = "/inference/v1/generate"
TEXT = ("stop", "bad_words")
"""Settings for which vLLM has to turn tokens into text while it samples."""


def body_of(request: SampleRequest, model: str, ends: frozenset[int]) -> dict[str, Any]:
    """A request for `request.n` completions; completion i has the seed of the first plus i."""
    settings = sampling_settings(request, ends)
    return {
        "model": model,
        "token_ids": sent_ids(request),
        "content_parts": [{"type": "image_url", "url": url} for url in sent_images(request)],
        "return_token_ids": True,
        "sampling_params": {"detokenize": any(name in settings for name in TEXT), **settings},
    }


def as_completions(url: str, answer: Any) -> tuple[dict[str, Any], int | None]:
    """The answer in the form that the completions route gives, and the number of tokens of the expanded prompt.

    Raises:
        BadAnswer: it is incomplete.
    """
    try:
        choices = [{**choice, "logprobs": _logprobs(choice.get("logprobs"))} for choice in answer["choices"]]
        prompt = answer.get("prompt_token_ids")
    except (KeyError, TypeError, AttributeError) as error:
        said = f"its answer is incomplete ({type(error).__name__}: {error}): {answer!r:.300}"
        raise BadAnswer(url, "generate", said) from error
    return {"choices": choices}, None if prompt is None else len(prompt)


def _logprobs(given: Any) -> dict[str, Any] | None:
    return None if given is None else {"token_logprobs": [one["logprob"] for one in given.get("content") or []]}
