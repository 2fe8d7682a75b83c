"""The loss: surrogate, filters, KL and entropy bonus over flat tokens, summed with precomputed weights.

It is pure: every average is already in the weights, so cutting a batch changes nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.losses import (
    KLEstimator,
    MismatchCorrection,
    RatioLevel,
    Surrogate,
    SurrogateInputs,
    SurrogateStats,
    k3,
    off_policy_keep,
    token_level,
)
from covey.core.records import Mean, Stat


@dataclass(frozen=True)
class Objective:
    """The minimised loss, as values."""

    surrogate: Surrogate  # token losses from ratios and advantages
    stats: SurrogateStats | None = None  # metrics of the surrogate (clip fractions, ...), or None
    ratio_level: RatioLevel = token_level  # how the importance ratio is formed
    beta: float = 0.0  # weight of the KL term in the loss; 0 leaves it out
    kl: KLEstimator = k3  # its estimator
    # multiply the KL term by the token ratio, which makes its gradient unbiased off-policy (DeepSeek-V3.2, arXiv
    # 2512.02556, eq. 7).
    correct_kl_bias: bool = False
    off_policy_threshold: float | None = None  # drop punished sequences that drifted further than this; None keeps all
    # computes mismatch weights from the engine's log-probs and those of the training pass, where the batch has no such
    # weights; this saves a scoring pass. None leaves the engine's distribution uncorrected.
    correction: MismatchCorrection | None = None
    # the surrogate itself uses the mismatch weights (VESPO), so they are not applied again
    mismatch_in_surrogate: bool = False
    zero_without_advantage: bool = True  # the surrogate of a token with advantage 0 is 0, whatever its ratio
    # each token is trained with its own advantage; False where a completion's tokens share one, so that credit for its
    # steps would be lost
    credits_tokens: bool = True

    @property
    def needs_every_rollout(self) -> bool:
        """True if rollouts of advantage 0 have a gradient, too, so that dropping them would change the step."""
        return self.beta != 0 or not self.zero_without_advantage


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything the loss looks at. All `[N]` but `lengths [B]`; see `TrainBatch` for meanings.

    `logprobs` and `entropies` come from the policy and carry the gradient. `old_logprobs` None means on-policy: the
    ratio is 1 with its gradient alive. `entropy_coef` weighs the entropy bonus (0 leaves it out). `skipped_tokens` and
    `skipped_rows` are what was left out for want of advantage; only metrics need them.
    """

    logprobs: Tensor
    entropies: Tensor | None
    sampled: Tensor
    lengths: Tensor
    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None
    mismatch_weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    entropy_threshold: float | None = None
    entropy_coef: float = 0.0
    skipped_tokens: int = 0
    skipped_rows: int = 0

    @classmethod
    def of(
        cls, batch: TrainBatch, logprobs: Tensor, entropies: Tensor | None, entropy_coef: float = 0.0
    ) -> "LossInputs":
        assert batch.advantages is not None and batch.weights is not None, "credit and weights come before the loss"
        shared = {name: getattr(batch, name) for name in cls.__slots__ if hasattr(batch, name)}
        return cls(logprobs=logprobs, entropies=entropies, entropy_coef=entropy_coef, **shared)

    def silenced(self) -> "LossInputs":
        """The same with 0 wherever no token was sampled: no number there, however wild, plays a part in anything."""
        silent: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor) and name not in ("sampled", "lengths"):
                silent[name] = torch.where(self.sampled, value, 0.0)
        return replace(self, **silent)


class LossResult(NamedTuple):
    """The loss (a scalar with its gradient), the metrics of these tokens, and the loss without its entropy bonus."""

    loss: Tensor
    stats: dict[str, Stat]
    without_bonus: float


def policy_loss(inputs: LossInputs, objective: Objective) -> LossResult:
    """loss = Σ_t w_t (keep_t · ρ_t · surrogate_t + β KL_t) - coef Σ_t w^H_t H_t.

    keep is the product of the off-policy and the entropy filter, ρ the engine/trainer mismatch weight; neither
    touches the KL term. Denominators (inside the weights) count filtered tokens too.
    """
    inputs = inputs.silenced()
    old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    log_ratio = objective.ratio_level(inputs.logprobs, old, inputs.sampled, inputs.lengths)
    rho = inputs.mismatch_weights
    corrected: dict[str, Stat] = {}
    if rho is None and inputs.engine_logprobs is not None and objective.correction is not None:
        rho, corrected = objective.correction(old, inputs.engine_logprobs, inputs.sampled, inputs.lengths)
    skipped = inputs.skipped_tokens, inputs.skipped_rows
    x = SurrogateInputs(
        log_ratio, inputs.logprobs, old, inputs.advantages, inputs.sampled, inputs.lengths, rho, *skipped
    )
    token_loss = objective.surrogate(x)
    stats = {**corrected, **(objective.stats(x) if objective.stats else {})}
    keep = _filters(inputs, objective, old)
    if keep is not None:
        token_loss = torch.where(keep, token_loss, 0.0)
        stats["kept_token_fraction"] = _masked_mean(keep.to(token_loss), inputs.sampled)
    if rho is not None and not objective.mismatch_in_surrogate:
        token_loss = token_loss * rho
    loss = _weighted(inputs.weights, token_loss)
    if objective.beta:
        assert inputs.ref_logprobs is not None, "a KL term needs the reference's log-probs"
        kl = objective.kl(inputs.logprobs, inputs.ref_logprobs)
        if objective.correct_kl_bias:
            kl = kl * (inputs.logprobs - old).exp()
        loss = loss + objective.beta * _weighted(inputs.weights, kl)
        stats["kl"] = _masked_mean(kl.detach(), inputs.sampled)
    without_bonus = loss.item()
    if inputs.entropies is not None:
        stats["entropy"] = _masked_mean(inputs.entropies.detach(), inputs.sampled)
        if inputs.entropy_weights is not None:
            loss = loss - inputs.entropy_coef * _weighted(inputs.entropy_weights, inputs.entropies)
    return LossResult(loss, stats, without_bonus)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ w v over the tokens that count; the others cannot spoil it, not even with an infinity."""
    return (weights * torch.where(weights != 0, values, 0.0)).sum()


def _filters(inputs: LossInputs, objective: Objective, old_logprobs: Tensor) -> Tensor | None:
    """Which tokens' surrogate counts, [N] bool, or None for all."""
    keep = None
    if objective.off_policy_threshold is not None:
        behaviour = old_logprobs if inputs.engine_logprobs is None else inputs.engine_logprobs
        masks, threshold = (inputs.sampled, inputs.lengths), objective.off_policy_threshold
        keep = off_policy_keep(inputs.advantages, inputs.logprobs, behaviour, *masks, threshold)
    if inputs.entropy_threshold is not None:
        assert inputs.entropies is not None, "an entropy threshold needs entropies"
        decisive = inputs.entropies.detach() >= inputs.entropy_threshold
        keep = decisive if keep is None else keep & decisive
    return keep


def _masked_mean(values: Tensor, sampled: Tensor) -> Mean:
    return Mean(torch.where(sampled, values, 0.0).sum().item(), sampled.sum().item())
