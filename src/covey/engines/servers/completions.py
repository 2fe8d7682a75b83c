"""Checks of the completions that a server returns, and the concatenation of their parts."""

import base64
import sys
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

from torch import Tensor

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import images_of
from covey.core.records import Completion, FinishReason
from covey.core.routes import RouteShape, continued
from covey.engines.servers.errors import BadAnswer, ServerRefused
from covey.engines.servers.protocols import SampledChunk

BEFORE_TEMPERATURE = (
    "it reports log-probs from before the temperature divides the logits, which cannot be compared with the trainer's"
)
ABOVE_ZERO = 1e-2  # rounding error by which a log-prob may exceed 0
# Server settings that may end a completion before, or continue it after, an end-of-sequence token.
STOPS = ("stop", "stop_token_ids", "ignore_eos", "structured_outputs", "regex", "json_schema")


def check_answer(
    url: str, request: SampleRequest, answer: list[SampledChunk], ends: frozenset[int], vocab_size: int | None
) -> None:
    """Check that `answer` is a valid answer to `request`; raises `BadAnswer` or `ServerRefused`."""
    if len(answer) != request.n:
        raise BadAnswer(url, "generate", f"it returned {len(answer)} completions instead of {request.n}")
    for chunk in answer:
        tokens = chunk.completion.token_ids
        invalid = next((token for token in tokens if not isinstance(token, int) or token < 0), None)
        if invalid is not None:
            raise BadAnswer(url, "generate", f"it returned {invalid!r} as a token id")
        if vocab_size is not None and tokens and max(tokens) >= vocab_size:
            message = f"it sampled token {max(tokens)}, and the vocabulary of the model that is trained ends at"
            hint = "Start the server with the model that is trained."
            raise ServerRefused(url, "generate", f"{message} {vocab_size}", hint)
        _check_logprobs(url, chunk.completion)
        if not (chunk.aborted or chunk.unfinished):
            _check_end(url, request, chunk.completion, ends)


def _check_logprobs(url: str, completion: Completion) -> None:
    reported, tokens = completion.logprobs, completion.token_ids
    if reported is None or len(reported) != len(tokens):
        message = f"it returned {'no' if reported is None else len(reported)} log-probs for {len(tokens)} tokens"
        raise BadAnswer(url, "generate", message)
    invalid = [number for number in reported if not _is_finite(number)]
    if invalid:
        message = f"{len(invalid)} of {len(reported)} log-probs are not finite numbers ({invalid[0]!r:.40})"
        hint = "Its weights may be damaged, or it overflows in float16: start it with --dtype bfloat16."
        raise BadAnswer(url, "generate", message, hint)
    if reported and max(reported) > ABOVE_ZERO:
        message = f"it returned log-probs above 0 ({max(reported):.3g}), which no natural logarithm of a probability is"
        raise BadAnswer(url, "generate", message, "Does it report logits? Have it report log-probs.")


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max  # an integer may be larger


def _check_end(url: str, request: SampleRequest, completion: Completion, ends: frozenset[int]) -> None:
    tokens, most = completion.token_ids, request.params.max_tokens
    message = None
    if len(tokens) > most:
        message = f"it returned a completion of {len(tokens)} tokens, but at most {most} were requested"
    elif completion.finish is FinishReason.LENGTH and len(tokens) < most:
        message = f"a completion was cut off after {len(tokens)} tokens of {most}"
    elif any(name in request.params.extra for name in STOPS):
        return
    elif completion.finish is FinishReason.STOP and (not tokens or tokens[-1] not in ends):
        last = f"with token {tokens[-1]}" if tokens else "before its first token"
        message = f"a completion ended {last}, and only {sorted(ends)} end one"
    elif any(token in ends for token in tokens[:-1]):
        message = f"a completion continued after a token that ends it (one of {sorted(ends)})"
    if message is not None:
        raise BadAnswer(url, "generate", message)


@dataclass
class PartialCompletion:
    """A completion in parts, perhaps from several versions of the weights; the lists have one entry per token."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    routes: Tensor | None = None  # of the first tokens of the prompt and the parts

    def add(self, chunk: SampledChunk, version: int | None) -> None:
        """Append a part. With a grammar or another extra setting an aborted part is dropped: it cannot continue."""
        if chunk.aborted and self.request.params.extra:
            return
        self.token_ids += chunk.completion.token_ids
        self.logprobs += chunk.completion.logprobs or []
        self.versions += [version] * len(chunk.completion.token_ids)
        if chunk.completion.routes is not None:
            self.routes = continued(self.routes, chunk.completion.routes)

    def finish(self, ends: frozenset[int]) -> FinishReason:
        return FinishReason.STOP if self.token_ids and self.token_ids[-1] in ends else FinishReason.LENGTH

    def complete(self, ends: frozenset[int]) -> bool:
        return len(self.token_ids) >= self.request.params.max_tokens or self.finish(ends) is FinishReason.STOP

    def rest(self) -> SampleRequest:
        """Request for the remaining tokens, with a new 63-bit seed: the old one would repeat its random numbers."""
        done = len(self.token_ids)
        params = replace(self.request.params, max_tokens=self.request.params.max_tokens - done)
        seeds = [(self.request.seeds[0] + done * 0x9E3779B97F4A7C15) % 2**63]
        return replace(self.request, prompt_ids=self.request.prompt_ids + self.token_ids, params=params, seeds=seeds)

    def completion(self, finish: FinishReason) -> Completion:
        known = [version for version in self.versions if version is not None]
        versions = known if len(known) == len(self.versions) else None
        return Completion(self.token_ids, self.logprobs, finish, versions=versions, routes=self.routes)


def with_routes(url: str, request: SampleRequest, completion: Completion, ids: Any, shape: RouteShape) -> Completion:
    """The completion with a server's experts `ids` [tokens, layers, k], for all tokens or all but the last.

    BadAnswer for any other number of tokens, or for experts that the model does not have.
    """
    computed = len(request.prompt_ids) + len(completion.token_ids) - 1
    try:
        routes = shape.of_server(ids[:computed])
    except (ValueError, TypeError, IndexError) as error:
        raise BadAnswer(url, "generate", f"the experts of its tokens cannot be read: {error}") from error
    if len(routes) < computed:
        message = f"it returned the experts of {len(routes)} tokens, but {computed} were computed"
        raise BadAnswer(url, "generate", message, "Update the server, or leave routing_replay unset.")
    return replace(completion, routes=routes)


def common_settings(params: SamplingParams, ends: frozenset[int]) -> dict[str, Any]:
    """All settings, under names that every backend knows; for missing ones the generation config would decide."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(ends),
    }


def refuse_reserved(extra: dict[str, Any], reserved: frozenset[str]) -> None:
    if taken := sorted(reserved & extra.keys()):
        raise ValueError(
            f"generation_kwargs={dict.fromkeys(taken, '...')} would break how completions are asked for: leave out"
            f" {', '.join(taken)}."
        )


def sent_images(request: SampleRequest) -> list[str]:
    urls = []
    for image in images_of(request.media):
        data = BytesIO()
        image.save(data, "PNG", compress_level=1)
        urls.append("data:image/png;base64," + base64.b64encode(data.getvalue()).decode())
    return urls


def check_expanded(url: str, request: SampleRequest, count: Any) -> None:
    """Compare the length of the prompt as expanded by a server (None: not reported) with the trainer's."""
    if count != len(request.prompt_ids):
        images = sum(len(media.images) for media in request.media)
        made = "does not report how many tokens it makes" if count is None else f"makes {count} tokens"
        ours = f"the trainer's processor makes {len(request.prompt_ids)}"
        hint = "Start it with the model that is trained and the same settings of its processor."
        message = f"it {made} of a prompt with {images} images, and {ours}"
        raise ServerRefused(url, "sample with images", message, hint)
