"""The loss: surrogate, filters, KL, further terms and entropy bonus over flat tokens, with precomputed weights.

It is pure: every average is already in the weights, so cutting a batch changes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.distillation import TeacherAdvantage
from covey.core.losses import (
    MAX_LOG_RATIO,
    KLEstimator,
    RatioLevel,
    Surrogate,
    SurrogateInputs,
    SurrogateStats,
    k3,
    token_level,
)
from covey.core.mismatch import MismatchCorrection, off_policy_keep
from covey.core.stats import Mean, Stat
from covey.core.terms import Coefficient, TokenTerm, term_inputs, term_loss

MAX_PENALTY = math.exp(MAX_LOG_RATIO)  # largest KL penalty of a token after the bias correction


@dataclass(frozen=True)
class Objective:
    """The minimised loss, as values."""

    surrogate: Surrogate  # token losses from ratios and advantages
    stats: SurrogateStats | None = None  # metrics of the surrogate (clip fractions, ...), or None
    ratio_level: RatioLevel = token_level  # how the importance ratio is formed
    beta: float = 0.0  # weight of the KL term in the loss; 0 leaves it out
    kl: KLEstimator = k3  # estimator of the KL term
    # multiply the KL term by the token ratio: an unbiased gradient off-policy (DeepSeek-V3.2, arXiv 2512.02556, eq. 7)
    correct_kl_bias: bool = False
    off_policy_threshold: float | None = None  # drop punished sequences that drifted further than this; None keeps all
    # computes mismatch weights where the batch has none, with the log-probs of the forward pass of training as the old
    # ones: on-policy this saves a scoring pass
    correction: MismatchCorrection | None = None
    # the surrogate itself uses the mismatch weights (VESPO), so they are not applied again
    mismatch_in_surrogate: bool = False
    zero_without_advantage: bool = True  # the surrogate of a token with advantage 0 is 0, whatever its ratio
    # each token is trained with its own advantage; False where a completion's tokens share one
    credits_tokens: bool = True
    needs_entropies: bool = False  # the surrogate reads entropies
    # (log-probs, advantages, random keys from 0 to 1), [N] of all trained tokens of a step -> `SurrogateInputs.chosen`
    choice: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    terms: tuple[TokenTerm, ...] = ()  # further terms, each over tokens of its own
    teacher: TeacherAdvantage | None = None  # adds a teacher's gap to the advantages
    surrogate_coef: Coefficient | None = None  # common weight of surrogate and KL term; None: 1

    @property
    def reads_named(self) -> bool:
        """True if a term reads the policy's log-probs of the tokens that the batch names."""
        return any(term.reads_named for term in self.terms)

    @property
    def divergence_beta(self) -> float | None:
        """β of the divergence over the whole vocabulary that a term reads; None if none does."""
        return next((term.beta for term in self.terms if term.beta is not None), None)

    @property
    def needs_every_rollout(self) -> bool:
        """True if rollouts of advantage 0 have a gradient, too, so that dropping them would change the step."""
        return self.beta != 0 or not self.zero_without_advantage or self.choice is not None


class LossResult(NamedTuple):
    """Result of `policy_loss`, all on the device, so that backward is launched without waiting for forward."""

    loss: Tensor  # scalar, with its gradient
    stats: dict[str, Stat]  # metrics of the micro-batch
    without_bonus: Tensor  # scalar, the loss without its entropy bonus and without a gradient


def policy_loss(
    batch: TrainBatch,
    logprobs: Tensor,
    entropies: Tensor | None,
    objective: Objective,
    entropy_coef: float = 0.0,
    step: int = 0,
    named: Tensor | None = None,
    divergence: Tensor | None = None,
) -> LossResult:
    """loss = c Σ_t w_t (keep_t ρ_t surrogate_t + β KL_t) + Σ_terms coef Σ_t w^term_t value_t - coef_H Σ_t w^H_t H_t.

    c is `Objective.surrogate_coef`, keep the product of the off-policy and the entropy filter, ρ the engine/trainer
    mismatch weight; keep and ρ do not apply to the KL term. Denominators (in the weights) count filtered tokens, too.

    Args:
        batch: rollouts with advantages and weights. Without `old_logprobs` (on-policy) the ratio is 1 and still carries
            the gradient.
        logprobs: [N] under the policy, with their gradient.
        entropies: [N] under the policy, or None where nothing needs them.
        objective: the loss as values.
        entropy_coef: weight of the entropy bonus (coef_H); 0 leaves it out.
        step: number of optimizer steps taken, for coefficients that have a schedule.
        named: [N, K] log-probs of the batch's `named_ids` under the policy; needed with `Objective.reads_named`.
        divergence: [N] divergence from each token's teacher over the whole vocabulary; needed with
            `Objective.divergence_beta`.
    """
    batch, sampled, of_terms = batch.silenced(), batch.sampled, logprobs
    assert batch.advantages is not None and batch.weights is not None, "credit and weights come before the loss"
    logprobs = torch.where(sampled, logprobs, 0.0)
    entropies = None if entropies is None else torch.where(sampled, entropies, 0.0)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = objective.ratio_level(logprobs, old, sampled, batch.lengths)
    rho, corrected = batch.mismatch_weights, dict[str, Stat]()
    if rho is None and batch.engine_logprobs is not None and objective.correction is not None:
        rho, corrected = objective.correction(old, batch.engine_logprobs, sampled, batch.lengths)
    more = batch.skipped_tokens, batch.skipped_rows, entropies, batch.ref_logprobs, batch.chosen
    advantages = batch.advantages if objective.teacher is None else objective.teacher(batch, logprobs, step)
    x = SurrogateInputs(log_ratio, logprobs, old, advantages, sampled, batch.lengths, rho, *more)
    token_loss = objective.surrogate(x)
    stats = {**corrected, **(objective.stats(x) if objective.stats else {})}
    keep = _filters(x, batch, objective)
    if keep is not None:
        token_loss = torch.where(keep, token_loss, 0.0)
        stats["kept_token_fraction"] = _masked_mean(keep.to(token_loss), sampled)
    if rho is not None and not objective.mismatch_in_surrogate:
        token_loss = token_loss * rho
    loss = _weighted(batch.weights, token_loss)
    if objective.beta:
        assert batch.ref_logprobs is not None, "a KL term needs the reference's log-probs"
        kl = objective.kl(logprobs, batch.ref_logprobs)
        if objective.correct_kl_bias:
            # Both factors are bounded: 0 · ∞ would be NaN, and an infinite product would make the loss infinite.
            kl = (kl * (logprobs - old).clamp(max=MAX_LOG_RATIO).exp()).clamp(-MAX_PENALTY, MAX_PENALTY)
        loss = loss + objective.beta * _weighted(batch.weights, kl)
        stats["kl"] = _masked_mean(kl.detach(), sampled)
    if objective.surrogate_coef is not None:
        loss = objective.surrogate_coef(step) * loss
    for term in objective.terms:
        if term.name not in batch.term_tokens:  # a batch made by hand, without the stages of a run
            continue
        value, found = term_loss(term, term_inputs(batch, term.name, of_terms, rho, named, divergence), step)
        loss, stats = loss + value, stats | found
    without_bonus = loss.detach()
    if entropies is not None:
        stats["entropy"] = _masked_mean(entropies.detach(), sampled)
        if batch.entropy_weights is not None:
            loss = loss - entropy_coef * _weighted(batch.entropy_weights, entropies)
    return LossResult(loss, stats, without_bonus)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ w v over the tokens with a weight; 0 · ∞ at another token would make the sum NaN."""
    return (weights * torch.where(weights != 0, values, 0.0)).sum()


def _filters(x: SurrogateInputs, batch: TrainBatch, objective: Objective) -> Tensor | None:
    """[N] bool, True where the surrogate of a token counts; None if all count."""
    keep = None
    if objective.off_policy_threshold is not None:
        behaviour = x.old_logprobs if batch.engine_logprobs is None else batch.engine_logprobs
        threshold = objective.off_policy_threshold
        keep = off_policy_keep(x.advantages, x.logprobs, behaviour, x.sampled, x.lengths, threshold)
    if batch.entropy_threshold is not None:
        assert x.entropies is not None, "an entropy threshold needs entropies"
        decisive = x.entropies.detach() >= batch.entropy_threshold
        keep = decisive if keep is None else keep & decisive
    return keep


def _masked_mean(values: Tensor, sampled: Tensor) -> Mean:
    return Mean(torch.where(sampled, values, 0.0).sum(), sampled.sum())
