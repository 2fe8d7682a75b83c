"""Further terms of the loss: each a weighted sum over tokens of its own, with a denominator of its own.

A term is averaged with the run's weighting, over its own tokens and the rollouts that have any, of one optimizer step
and all ranks. Tokens outside the term are in neither its sum nor its count. Counts are taken before a batch is cut, so
that the gradient does not depend on the cut. To add a term, write a `TokenTerm` and name it in
`covey.algorithms.terms.TERMS`.

Letters: N tokens of B rollouts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, expand, segment_sum
from covey.core.losses import MAX_LOG_RATIO, BatchCounts, Weighting
from covey.core.stats import Mean, Stat

Coefficient = Callable[[int], float]
"""Number of optimizer steps taken -> weight of a part of the loss."""


@dataclass(frozen=True, slots=True)
class TermInputs:
    """Inputs of a term, `[N]` but for `named`; log-probs and weights are finite outside the term as well."""

    tokens: Tensor  # mask of the term's tokens
    logprobs: Tensor  # log π(o_t) under the policy being trained; carries the gradient
    old_logprobs: Tensor  # log π_old(o_t), constant; log π(o_t) itself at tokens that the policy did not sample
    mismatch_weights: Tensor | None  # engine/trainer importance weights, 1 at tokens that were not sampled; or None
    # [N, K] log π of `TrainBatch.named_ids` with the gradient, -inf for none; or None
    named: Tensor | None
    divergence: Tensor | None  # from the token's teacher over the whole vocabulary, with the gradient; or None
    batch: TrainBatch  # the micro-batch; its fields may be NaN outside the term

    @property
    def ratio(self) -> Tensor:
        """The importance ratio of each token, [N]; never infinite."""
        return (self.logprobs - self.old_logprobs).clamp(max=MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class TokenTerm:
    """A term of the loss: coef · Σ_t w_t value_t over its own tokens, Σ_t w_t being 1 with the token mean.

    Metrics are `{name}/loss`, the mean of the values over the term's tokens, and those of `stats`.
    """

    name: str
    # batch -> [N] share of each token: 0 outside the term, else 1 or a factor of the token's own; None for a term whose
    # tokens are in no rollout (demonstrations). The batch has the log-probs of other policies but no advantages yet: a
    # term that depends on advantages returns 0 from `value` instead.
    tokens: Callable[[TrainBatch], Tensor] | None
    value: Callable[[TermInputs], Tensor]  # -> [N], which is minimised
    coef: Coefficient
    stats: Callable[[TermInputs], dict[str, Stat]] | None = None  # further metrics
    reads_named: bool = False  # `value` reads `TermInputs.named`
    beta: float | None = None  # β of `TermInputs.divergence`, if `value` reads it; else None


class TermCounts(NamedTuple):
    """Sizes of a term in a rollout batch, or in a share of it."""

    tokens: float
    rows: float  # rollouts that have any of its tokens
    micro_batches: float  # nominal micro-batches that have any

    @classmethod
    def of(cls, tokens: Tensor, rows: int) -> "TermCounts":
        """Sizes from each rollout's `tokens` [B] of the term; a nominal micro-batch has `rows` rollouts."""
        micro_batches = sum(bool((part > 0).any()) for part in tokens.split(rows))
        return cls(float(tokens.sum()), float((tokens > 0).sum()), float(micro_batches))

    @classmethod
    def sum(cls, parts: Iterable["TermCounts"]) -> "TermCounts":
        return cls(*map(sum, zip(*parts, strict=True)))

    def times(self, share: float) -> "TermCounts":
        return TermCounts(*(share * count for count in self))

    def scales(
        self, weighting: Weighting, tokens: Tensor, micro_tokens: Tensor, max_completion_length: int | Tensor | None
    ) -> Tensor:
        """Normalisers of rollouts [B], if these are the counts of an optimizer step over all ranks.

        Args:
            weighting: average of token losses.
            tokens: [B] tokens of the term in each rollout.
            micro_tokens: [B] tokens of the term in each rollout's nominal micro-batch.
            max_completion_length: as in `BatchCounts`.
        """
        counts = BatchCounts(
            tokens,
            micro_tokens,
            rows_per_update=self.rows or 1.0,
            tokens_per_update=self.tokens,
            micro_batches_per_update=self.micro_batches or 1.0,
            max_completion_length=max_completion_length,
        )
        return weighting(counts)


def tokens_of_terms(terms: Sequence[TokenTerm], batch: TrainBatch) -> dict[str, Tensor]:
    """`TrainBatch.term_tokens` of a batch: [N] shares by the term's name, for terms with tokens in rollouts."""
    return {term.name: term.tokens(batch) for term in terms if term.tokens is not None}


def term_sizes(batch: TrainBatch) -> dict[str, Tensor]:
    """[B] int64, the tokens of each rollout that are part of a term, by the term's name."""
    return {name: segment_sum((shares != 0).long(), batch.lengths) for name, shares in batch.term_tokens.items()}


def term_weights(batch: TrainBatch, name: str) -> Tensor:
    """[N] weights of the tokens in a term, 0 for those that are not part of it."""
    shares = batch.term_tokens[name]
    return shares * expand(batch.term_scales[name], batch.lengths, len(shares))


def term_inputs(
    batch: TrainBatch,
    name: str,
    logprobs: Tensor,
    rho: Tensor | None,
    named: Tensor | None = None,
    divergence: Tensor | None = None,
) -> TermInputs:
    """Inputs of a term from a silenced batch, the log-probs [N] of its `scored` tokens, and mismatch weights [N]."""
    tokens = batch.term_tokens[name] != 0
    logprobs = torch.where(tokens, logprobs, 0.0)
    old, sampled = logprobs.detach(), tokens & batch.sampled
    if batch.old_logprobs is not None:
        old = torch.where(sampled, batch.old_logprobs, old)
    rho = None if rho is None else torch.where(sampled, rho, 1.0)
    return TermInputs(tokens, logprobs, old, rho, named, divergence, batch)


def term_loss(term: TokenTerm, x: TermInputs, step: int) -> tuple[Tensor, dict[str, Stat]]:
    """The term of a micro-batch, a scalar with its gradient, and its metrics."""
    values = torch.where(x.tokens, term.value(x), 0.0)
    stats: dict[str, Stat] = {f"{term.name}/loss": Mean(values.detach().sum(), x.tokens.sum())}
    if term.stats is not None:
        stats |= term.stats(x)
    return term.coef(step) * (term_weights(x.batch, term.name) * values).sum(), stats


def constant(value: float) -> Coefficient:
    """The same weight in every step."""
    return lambda step: value


def peak_and_valley(step: int, *, warmup: int, peak: float, decay: int, valley: float) -> float:
    """Weight of a term in a step: linear from 0 to `peak` in `warmup` steps, by a cosine to `valley` in `decay` more.

    CHORD's schedule (arXiv 2508.11408, §3.2).
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
