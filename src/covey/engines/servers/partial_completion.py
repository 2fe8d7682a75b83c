"""What a server sampled, checked before anything trusts it, and put together where it came in parts."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.rollout import Completion, FinishReason
from covey.engines.servers.errors import BadAnswer, ServerRefused
from covey.engines.servers.protocols import SampledChunk

ABOVE_ZERO = 1e-2
"""A log-prob may be this much above 0 by rounding."""

STOPS = ("stop", "stop_token_ids", "ignore_eos", "structured_outputs", "regex", "json_schema")
"""Settings of servers with which a completion may end, or go on, elsewhere than at an end-of-sequence token."""


def check_answer(
    url: str, request: SampleRequest, answer: list[SampledChunk], ends: frozenset[int], vocab_size: int | None
) -> None:
    """Refuse what cannot have come of `request`.

    Raises:
        BadAnswer: completions are missing, cut short or go on too long, or log-probs are missing or are none.
        ServerRefused: a token that the trainer's model does not have.
    """
    if len(answer) != request.n:
        raise BadAnswer(url, "generate", f"{len(answer)} completions came where {request.n} were asked for")
    for sampled in answer:
        _check_tokens(url, sampled.completion.token_ids, vocab_size)
        _check_logprobs(url, sampled.completion)
        if not sampled.aborted:
            _check_end(url, request, sampled.completion, ends)


def _check_tokens(url: str, tokens: list[int], vocab_size: int | None) -> None:
    strange = next((token for token in tokens if not isinstance(token, int) or token < 0), None)
    if strange is not None:
        raise BadAnswer(url, "generate", f"{strange!r} came where a token belongs")
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        said = f"it sampled token {max(tokens)}, and the vocabulary of the model that is trained ends at {vocab_size}"
        raise ServerRefused(url, "generate", said, "Start the server with the model that is trained.")


def _check_logprobs(url: str, completion: Completion) -> None:
    reported, tokens = completion.logprobs, completion.token_ids
    if reported is None or len(reported) != len(tokens):
        said = f"{'no' if reported is None else len(reported)} log-probs came for {len(tokens)} tokens"
        raise BadAnswer(url, "generate", said)
    broken = [number for number in reported if not _is_finite(number)]
    if broken:
        said = f"{len(broken)} of {len(reported)} log-probs are none ({broken[0]!r:.40})"
        hint = "Its weights may be damaged, or it overflows in float16: start it with --dtype bfloat16."
        raise BadAnswer(url, "generate", said, hint)
    if reported and max(reported) > ABOVE_ZERO:
        said = f"log-probs above 0 came ({max(reported):.3g}), so they are no logarithms of probabilities"
        raise BadAnswer(url, "generate", said, "Does it report logits? Have it report log-probs.")


def _is_finite(number: Any) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _check_end(url: str, request: SampleRequest, completion: Completion, ends: frozenset[int]) -> None:
    tokens, most = completion.token_ids, request.params.max_tokens
    said = None
    if len(tokens) > most:
        said = f"a completion of {len(tokens)} tokens came where at most {most} were asked for"
    elif completion.finish is FinishReason.LENGTH and len(tokens) < most:
        said = f"a completion was cut off after {len(tokens)} tokens of {most}"
    elif any(name in request.params.extra for name in STOPS):
        return
    elif completion.finish is FinishReason.STOP and (not tokens or tokens[-1] not in ends):
        last = f"with token {tokens[-1]}" if tokens else "before its first token"
        said = f"a completion ended {last}, and only {sorted(ends)} end one"
    elif any(token in ends for token in tokens[:-1]):
        said = f"a completion went on after a token that ends it (one of {sorted(ends)})"
    if said is not None:
        raise BadAnswer(url, "generate", said)


@dataclass
class PartialCompletion:
    """A completion on its way, maybe through several versions of the weights.

    Attributes:
        request: of this one completion.
        token_ids, logprobs, versions: of what there is so far, one entry per token.
    """

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)

    def add(self, sampled: SampledChunk, version: int | None) -> None:
        """Take a part; what a grammar or a count of earlier tokens shaped cannot be continued and is dropped."""
        if sampled.aborted and self.request.params.extra:
            return
        self.token_ids += sampled.completion.token_ids
        self.logprobs += sampled.completion.logprobs or []
        self.versions += [version] * len(sampled.completion.token_ids)

    def end(self, ends: frozenset[int]) -> FinishReason:
        """Why it is over, by what there is of it."""
        return FinishReason.STOP if self.token_ids and self.token_ids[-1] in ends else FinishReason.LENGTH

    def complete(self, ends: frozenset[int]) -> bool:
        """Whether it was broken off after its last token."""
        return len(self.token_ids) >= self.request.params.max_tokens or self.end(ends) is FinishReason.STOP

    def rest(self) -> SampleRequest:
        """What is still to be sampled: with a seed of its own, or the same noise would come again."""
        done = len(self.token_ids)
        params = replace(self.request.params, max_tokens=self.request.params.max_tokens - done)
        seeds = [_mixed(self.request.seeds[0], done)]
        return replace(self.request, prompt_ids=self.request.prompt_ids + self.token_ids, params=params, seeds=seeds)

    def completion(self, finish: FinishReason) -> Completion:
        """All parts as one."""
        known = [version for version in self.versions if version is not None]
        versions = known if len(known) == len(self.versions) else None
        return Completion(self.token_ids, self.logprobs, finish, versions=versions)


def one_of(request: SampleRequest, index: int, **changes: Any) -> SampleRequest:
    """The request of one of its completions."""
    return replace(request, n=1, seeds=[request.seeds[index]], drafts=None, draft_logprobs=None, **changes)


def _mixed(seed: int, number: int) -> int:
    """Another 63-bit seed for another number; the seed itself for 0."""
    return (seed + number * 0x9E3779B97F4A7C15) % 2**63
