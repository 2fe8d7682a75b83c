"""Checks of the completions that a server returns, and the concatenation of their parts."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.records import Completion, FinishReason
from covey.engines.servers.errors import BadAnswer, ServerRefused
from covey.engines.servers.protocols import SampledChunk

ABOVE_ZERO = 1e-2
"""Rounding error by which a log-prob may exceed 0."""

STOPS = ("stop", "stop_token_ids", "ignore_eos", "structured_outputs", "regex", "json_schema")
"""Server settings with which a completion may end, or go on, elsewhere than at an end-of-sequence token."""


def check_answer(
    url: str, request: SampleRequest, answer: list[SampledChunk], ends: frozenset[int], vocab_size: int | None
) -> None:
    """Check that `answer` is a possible one to `request`.

    Raises:
        BadAnswer: completions are missing, too short or too long, or log-probs are missing or invalid.
        ServerRefused: a token that the trainer's model does not have.
    """
    if len(answer) != request.n:
        raise BadAnswer(url, "generate", f"{len(answer)} completions came where {request.n} were asked for")
    for chunk in answer:
        tokens = chunk.completion.token_ids
        invalid = next((token for token in tokens if not isinstance(token, int) or token < 0), None)
        if invalid is not None:
            raise BadAnswer(url, "generate", f"{invalid!r} came where a token belongs")
        if vocab_size is not None and tokens and max(tokens) >= vocab_size:
            message = f"it sampled token {max(tokens)}, and the vocabulary of the model that is trained ends at"
            hint = "Start the server with the model that is trained."
            raise ServerRefused(url, "generate", f"{message} {vocab_size}", hint)
        _check_logprobs(url, chunk.completion)
        if not chunk.aborted:
            _check_end(url, request, chunk.completion, ends)


def _check_logprobs(url: str, completion: Completion) -> None:
    reported, tokens = completion.logprobs, completion.token_ids
    if reported is None or len(reported) != len(tokens):
        message = f"{'no' if reported is None else len(reported)} log-probs came for {len(tokens)} tokens"
        raise BadAnswer(url, "generate", message)
    invalid = [number for number in reported if not _is_finite(number)]
    if invalid:
        message = f"{len(invalid)} of {len(reported)} log-probs are not finite numbers ({invalid[0]!r:.40})"
        hint = "Its weights may be damaged, or it overflows in float16: start it with --dtype bfloat16."
        raise BadAnswer(url, "generate", message, hint)
    if reported and max(reported) > ABOVE_ZERO:
        message = f"log-probs above 0 came ({max(reported):.3g}), so they are no logarithms of probabilities"
        raise BadAnswer(url, "generate", message, "Does it report logits? Have it report log-probs.")


def _is_finite(number: Any) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _check_end(url: str, request: SampleRequest, completion: Completion, ends: frozenset[int]) -> None:
    tokens, most = completion.token_ids, request.params.max_tokens
    message = None
    if len(tokens) > most:
        message = f"a completion of {len(tokens)} tokens came where at most {most} were asked for"
    elif completion.finish is FinishReason.LENGTH and len(tokens) < most:
        message = f"a completion was cut off after {len(tokens)} tokens of {most}"
    elif any(name in request.params.extra for name in STOPS):
        return
    elif completion.finish is FinishReason.STOP and (not tokens or tokens[-1] not in ends):
        last = f"with token {tokens[-1]}" if tokens else "before its first token"
        message = f"a completion ended {last}, and only {sorted(ends)} end one"
    elif any(token in ends for token in tokens[:-1]):
        message = f"a completion went on after a token that ends it (one of {sorted(ends)})"
    if message is not None:
        raise BadAnswer(url, "generate", message)


@dataclass
class PartialCompletion:
    """A completion in parts, perhaps from several versions of the weights.

    Attributes:
        request: for this single completion.
        token_ids, logprobs, versions: of the parts so far, one entry per token.
    """

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)

    def add(self, chunk: SampledChunk, version: int | None) -> None:
        """Append a part. An aborted one under a grammar, or another extra setting, cannot be continued: dropped."""
        if chunk.aborted and self.request.params.extra:
            return
        self.token_ids += chunk.completion.token_ids
        self.logprobs += chunk.completion.logprobs or []
        self.versions += [version] * len(chunk.completion.token_ids)

    def finish(self, ends: frozenset[int]) -> FinishReason:
        """Finish reason by the last token."""
        return FinishReason.STOP if self.token_ids and self.token_ids[-1] in ends else FinishReason.LENGTH

    def complete(self, ends: frozenset[int]) -> bool:
        """Tell whether no token is left to sample."""
        return len(self.token_ids) >= self.request.params.max_tokens or self.finish(ends) is FinishReason.STOP

    def rest(self) -> SampleRequest:
        """Request for the remaining tokens, with another 63-bit seed: the same one would repeat the noise."""
        done = len(self.token_ids)
        params = replace(self.request.params, max_tokens=self.request.params.max_tokens - done)
        seeds = [(self.request.seeds[0] + done * 0x9E3779B97F4A7C15) % 2**63]
        return replace(self.request, prompt_ids=self.request.prompt_ids + self.token_ids, params=params, seeds=seeds)

    def completion(self, finish: FinishReason) -> Completion:
        """All parts as one."""
        known = [version for version in self.versions if version is not None]
        versions = known if len(known) == len(self.versions) else None
        return Completion(self.token_ids, self.logprobs, finish, versions=versions)


def single_request(request: SampleRequest, index: int) -> SampleRequest:
    """Request for one of the completions of `request`."""
    return replace(request, n=1, seeds=[request.seeds[index]], drafts=None, draft_logprobs=None)
