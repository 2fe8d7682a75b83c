"""Formulas of the losses: importance ratios, surrogates, KL estimators, and averages of token losses.

One pure function per published formula, on flat vectors `[N]`. To add a loss, write a surrogate and register it
(`covey.algorithms.register_loss`); ratio levels and KL estimators have tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.core.batch import expand, masked_segment_mean, segment_sum
from covey.core.stats import Max, Mean, Min, Stat

MAX_LOG_RATIO = 80.0
"""Largest log-ratio that is exponentiated: e^80 is far beyond every clip and still finite in float32."""

LOG_FLOOR = torch.tensor(1e-8).log().item()
"""Smallest log-weight of a sequence in VESPO."""

# ---- importance ratios of the updated over the old policy ------------------------------------------------------------

RatioLevel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs [N], old_logprobs [N], sampled [N], lengths [B]) -> log-ratio [N]."""


def token_level(logprobs: Tensor, old_logprobs: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """log r_t = log π(o_t) - log π_old(o_t): PPO and GRPO (arXiv 2402.03300, eq. 3)."""
    return logprobs - old_logprobs


def sequence_level(logprobs: Tensor, old_logprobs: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """log s_i = mean over the sequence of log r_t: GSPO (arXiv 2507.18071, eq. 7)."""
    return expand(masked_segment_mean(logprobs - old_logprobs, sampled, lengths), lengths, len(sampled))


def sequence_token_level(logprobs: Tensor, old_logprobs: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """log(sg[s_i] · π(o_t) / sg[π(o_t)]): the sequence's ratio, each token's gradient; GSPO-token (ibid., eq. 14)."""
    sequence = sequence_level(logprobs.detach(), old_logprobs, sampled, lengths)
    return sequence + logprobs - logprobs.detach()


def sequence_sum_level(logprobs: Tensor, old_logprobs: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """log(π(o_i) / π_old(o_i)), the whole completion as one action: RLOO (arXiv 2402.14740, §3).

    Each token has the ratio of its completion and |o_i| times the gradient of its own log-prob. If all tokens of a
    completion have the same advantage, the mean of their losses has the gradient of the completion's loss.
    """
    difference = torch.where(sampled, logprobs - old_logprobs, 0.0)
    counts = expand(segment_sum(sampled.to(difference), lengths), lengths, len(sampled))
    total = expand(segment_sum(difference.detach(), lengths), lengths, len(sampled))
    return total + counts * (difference - difference.detach())


RATIO_LEVELS: dict[str, RatioLevel] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
    "sequence_sum": sequence_sum_level,
}


# ---- surrogates: the loss of each token; the token weights are 0 where nothing is trained ----------------------------


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """Inputs of a surrogate; all `[N]` but `lengths [B]`."""

    log_ratio: Tensor  # log importance ratio at the chosen level; carries the gradient
    logprobs: Tensor  # log π(o_t) under the policy being trained; carries the gradient
    old_logprobs: Tensor  # log π_old(o_t), constant
    advantages: Tensor  # credit
    sampled: Tensor  # mask of trained tokens
    lengths: Tensor  # tokens of each rollout
    mismatch_weights: Tensor | None = None  # engine/trainer importance weights, or None
    # trained tokens and rollouts left out because their advantage is 0; clip fractions count them as not clipped
    skipped_tokens: int = 0
    skipped_rows: int = 0
    entropies: Tensor | None = None  # in nats; None unless the run computes them (`register_loss(..., entropies=True)`)
    ref_logprobs: Tensor | None = None  # log π_ref(o_t); None without a reference (`beta` above 0 loads one)
    chosen: Tensor | None = None  # mask of the tokens that `Objective.choice` selected; None in evaluations, or without

    @property
    def ratio(self) -> Tensor:
        """The importance ratio r = exp(log_ratio), [N]; never infinite, as 0 · ∞ would make clipped gradients NaN."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()


Surrogate = Callable[[SurrogateInputs], Tensor]
SurrogateStats = Callable[[SurrogateInputs], dict[str, Stat]]


def clip(x: SurrogateInputs, *, epsilon_low: float, epsilon_high: float, delta: float | None = None) -> Tensor:
    """-min(min(r, δ) A, clip(r, 1-ε_low, 1+ε_high) A).

    PPO's clipped objective with DAPO's clip-higher (arXiv 2503.14476, eq. 10) and, with δ, INTELLECT-2's upper bound
    for punished tokens (arXiv 2505.07291, two-sided clipping).
    """
    ratio = x.ratio
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * x.advantages, clipped * x.advantages)


def cispo(x: SurrogateInputs, *, epsilon_high: float) -> Tensor:
    """-sg[min(r, ε_high)] A log π: clip the weight, never the gradient (CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4).

    As in ScaleRL (arXiv 2510.13786), ε_high is the largest weight itself, not a distance from 1.
    """
    return -x.ratio.detach().clamp(max=epsilon_high) * x.advantages * x.logprobs


def sapo(x: SurrogateInputs, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """-(4/τ) σ(τ (r-1)) A with τ by the sign of A: a soft trust region (SAPO, arXiv 2511.20347)."""
    tau = torch.where(x.advantages > 0, temperature_pos, temperature_neg)
    return -(4.0 / tau) * torch.sigmoid(tau * (x.ratio - 1)) * x.advantages


def vespo_phi(x: SurrogateInputs, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Tensor:
    """φ(w) = exp(λ + k log w - λ w) of the sequence's importance weight w, constant, [N] (VESPO, arXiv 2602.10693)."""
    log_ratio = (x.logprobs - x.old_logprobs).detach().clamp(-20.0, 20.0)
    log_w = segment_sum(torch.where(x.sampled, log_ratio, 0.0), x.lengths)
    if x.mismatch_weights is not None:
        log_rho = x.mismatch_weights.clamp(min=1e-8).log().clamp(min=LOG_FLOOR, max=20.0)
        log_w = log_w + segment_sum(torch.where(x.sampled, log_rho, 0.0), x.lengths)
    log_w = expand(log_w.clamp(min=LOG_FLOOR, max=20.0), x.lengths, len(x.sampled))
    good = x.advantages >= 0
    k, lam = torch.where(good, k_pos, k_neg), torch.where(good, lambda_pos, lambda_neg)
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(0.0, posinf=0.0, neginf=0.0)


def vespo(x: SurrogateInputs, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Tensor:
    """-φ(w) A log π: the sequence weight reshaped by a gamma kernel (VESPO, arXiv 2602.10693)."""
    phi = vespo_phi(x, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    return -phi * x.advantages * x.logprobs


def gmpo(x: SurrogateInputs, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """-A_i · exp(mean_t clip'(log r_t)): the geometric mean of clipped token ratios (GMPO, arXiv 2507.20673).

    clip' bounds log r from above by ε_high where A > 0 and from below by -ε_low where A < 0: the paper's
    min(r A, clip(r, e^-ε_low, e^ε_high) A) in log space. Every token of a rollout carries the rollout's value.
    """
    bounded = torch.where(x.advantages > 0, x.log_ratio.clamp(max=epsilon_high), x.log_ratio.clamp(min=-epsilon_low))
    log_ratio = masked_segment_mean(bounded, x.sampled, x.lengths).clamp(max=MAX_LOG_RATIO)
    return -x.advantages * expand(log_ratio, x.lengths, len(x.sampled)).exp()


def clip_stats(x: SurrogateInputs, *, low: float, high: float, per_sequence: bool = False) -> dict[str, Stat]:
    """Clip fractions: r < low where A < 0, r > high where A > 0, over trained tokens (or sequences).

    `low_min` and `high_max` are the smallest and the largest fraction within one completion, so that they do not depend
    on how a step is cut into micro-batches.
    """
    ratio = x.ratio.detach()
    is_low = ((ratio < low) & (x.advantages < 0) & x.sampled).to(ratio)
    is_high = ((ratio > high) & (x.advantages > 0) & x.sampled).to(ratio)
    trained = segment_sum(x.sampled.to(ratio), x.lengths) > 0
    low_of_each = masked_segment_mean(is_low, x.sampled, x.lengths)
    high_of_each = masked_segment_mean(is_high, x.sampled, x.lengths)
    if per_sequence:  # the ratio is constant over a sequence: its mean over the tokens is 0 or 1
        count, is_low, is_high = trained.sum() + x.skipped_rows, low_of_each, high_of_each
    else:
        count = x.sampled.sum() + x.skipped_tokens
    lows, highs = is_low.sum(), is_high.sum()
    unclipped = low_of_each.new_zeros(1 if x.skipped_rows else 0)
    counted = torch.cat([trained, unclipped == 0])
    return {
        "clip_ratio/low_mean": Mean(lows, count),
        "clip_ratio/low_min": Min(-largest(-torch.cat([low_of_each, unclipped]), counted)),
        "clip_ratio/high_mean": Mean(highs, count),
        "clip_ratio/high_max": Max(largest(torch.cat([high_of_each, unclipped]), counted)),
        "clip_ratio/region_mean": Mean(lows + highs, count),
    }


def largest(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value where `mask` is True, as a scalar tensor (NaN if it is True nowhere): no wait for a GPU."""
    nothing = values.new_full((1,), -torch.inf)
    largest = torch.cat([torch.where(mask, values, nothing), nothing]).max()
    return torch.where(mask.any(), largest, torch.nan)


def cispo_stats(x: SurrogateInputs, *, epsilon_high: float) -> dict[str, Stat]:
    """`cispo_clip_ratio`: fraction of trained tokens with A > 0 whose ratio is above the cap."""
    cut = (x.ratio.detach() > epsilon_high) & (x.advantages > 0) & x.sampled
    return {"cispo_clip_ratio": Mean(cut.sum(), x.sampled.sum() + x.skipped_tokens)}


def vespo_stats(x: SurrogateInputs, **kernel: float) -> dict[str, Stat]:
    """`vespo/phi_seq_mean`: the mean of φ over sequences."""
    phi = masked_segment_mean(vespo_phi(x, **kernel), x.sampled, x.lengths)  # 0 where no token is trained
    trained = segment_sum(x.sampled.to(phi), x.lengths) > 0
    return {"vespo/phi_seq_mean": Mean(phi.sum(), trained.sum())}


# ---- KL(policy || reference): Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html --

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs [N], ref_logprobs [N]) -> KL estimate of each token [N]; below p = π(o_t), q = π_ref(o_t)."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(p/q): unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log(p/q))² / 2: biased, low variance; on-policy its expected gradient is the gradient of the KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - log(q/p) - 1: unbiased, low variance, never negative (DeepSeekMath, arXiv 2402.03300, eq. 4).

    Constant where log(q/p) exceeds `MAX_LOG_RATIO`, because an infinite penalty would make the loss infinite or NaN.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


# ---- averages as token weights: one value per rollout [B], fixed before a batch is cut into micro-batches ------------


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts that a weighting may divide by."""

    tokens: Tensor  # [B] float, the trained tokens of each rollout
    # [B] float, trained tokens of the rollout's nominal micro-batch: `per_device_train_batch_size` rollouts that a rank
    # sampled one after the other
    micro_tokens: Tensor
    rows_per_update: float  # rollouts of one optimizer step, over all ranks
    # trained tokens of one optimizer step, over all ranks: those of the rollout batch divided by its optimizer steps
    tokens_per_update: float
    micro_batches_per_update: float  # nominal micro-batches of one optimizer step, over all ranks
    max_completion_length: int | Tensor | None  # most tokens of a completion; [B] where it differs between rollouts


Weighting = Callable[[BatchCounts], Tensor]


def mean_per_sequence(counts: BatchCounts) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t: the sample-level mean of GRPO (arXiv 2402.03300, eq. 3)."""
    return 1.0 / (counts.tokens.clamp(min=1.0) * counts.rows_per_update)


def mean_per_micro_batch(counts: BatchCounts) -> Tensor:
    """The token mean of each nominal micro-batch, averaged over micro-batches: `loss_type="bnpo"`.

    This is an average only. The BNPO paper (arXiv 2506.02864) also normalises rewards with a Beta distribution, which
    `loss_type="bnpo"` does not do.
    """
    return 1.0 / (counts.micro_tokens.clamp(min=1.0) * counts.micro_batches_per_update)


def mean_constant_length(counts: BatchCounts) -> Tensor:
    """1/(B · L_max) Σ_i Σ_t: no length bias (Dr. GRPO, arXiv 2503.20783, §3.2)."""
    longest = counts.max_completion_length
    assert longest is not None, "checked with the config"
    if isinstance(longest, Tensor):
        return 1.0 / (counts.rows_per_update * longest.to(counts.tokens))
    return torch.full_like(counts.tokens, 1.0 / (counts.rows_per_update * longest))


def mean_over_update(counts: BatchCounts) -> Tensor:
    """1/Σ|o_i| Σ_i Σ_t: the token-level mean of DAPO (arXiv 2503.14476, eq. 12), over the whole optimizer step."""
    return torch.full_like(counts.tokens, 1.0 / (counts.tokens_per_update or 1.0))


def sum_per_sequence(counts: BatchCounts) -> Tensor:
    """1/B Σ_i Σ_t: every token counts fully (LUSPO, arXiv 2602.05261: a sequence's loss times its length)."""
    return torch.full_like(counts.tokens, 1.0 / counts.rows_per_update)


@dataclass(frozen=True, slots=True)
class Pool:
    """Rollouts with an average of their own, such as the rollouts of one source."""

    members: Tensor  # [B] bool
    rows_per_update: float  # as in `BatchCounts`, counting only the pool's rollouts
    tokens_per_update: float  # the same
    factor: float  # weight of the pool's average in the loss


def pooled(weighting: Weighting, pools: Sequence[Pool]) -> Weighting:
    """Σ_p factor_p · (average over pool p): a weighting that applies `weighting` within each pool."""

    def weigh(counts: BatchCounts) -> Tensor:
        weights = torch.zeros_like(counts.tokens)
        for pool in pools:
            longest = counts.max_completion_length
            own = replace(
                counts,
                tokens=counts.tokens[pool.members],
                micro_tokens=counts.micro_tokens[pool.members],
                rows_per_update=pool.rows_per_update or 1.0,
                tokens_per_update=pool.tokens_per_update,
                max_completion_length=longest[pool.members] if isinstance(longest, Tensor) else longest,
            )
            weights[pool.members] = pool.factor * weighting(own)
        return weights

    return weigh


def token_weights(weighting: Weighting, counts: BatchCounts, sampled: Tensor, lengths: Tensor) -> Tensor:
    """Weights [N]: the rollout's value where a token is trained, 0 elsewhere."""
    return torch.where(sampled, expand(weighting(counts), lengths), 0.0)
