"""Surrogate losses, one pure function per published objective: the loss of each token before averaging.

A surrogate takes `SurrogateInputs` and returns the loss of every token, `[N]`, to be minimised. It knows neither
masks nor averages: tokens that are not trained get weight 0 later. To add one, write such a function and register
it (`covey.algorithms.register_loss`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.core.metrics import Max, Mean, Min, Stat
from covey.core.ragged import expand, masked_segment_mean, segment_sum
from covey.core.ratios import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """Inputs of a surrogate; all `[N]` but `lengths [B]`.

    Attributes:
        log_ratio: log importance ratio at the chosen level; carries the gradient.
        logprobs: log π(o_t) under the policy being trained; carries the gradient.
        old_logprobs: log π_old(o_t), constant.
        advantages: credit.
        sampled: mask of trained tokens.
        lengths: tokens of each rollout.
        mismatch_weights: engine/trainer importance weights, or None.
        skipped_tokens, skipped_rows: trained tokens and rollouts that were left out because their advantage is 0;
            clip fractions count them as not clipped.
    """

    log_ratio: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sampled: Tensor
    lengths: Tensor
    mismatch_weights: Tensor | None = None
    skipped_tokens: int = 0
    skipped_rows: int = 0

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
    log_w = segment_sum(
        torch.where(x.sampled, (x.logprobs - x.old_logprobs).detach().clamp(-20.0, 20.0), 0.0), x.lengths
    )
    floor = torch.tensor(1e-8).log().item()
    if x.mismatch_weights is not None:
        log_rho = x.mismatch_weights.clamp(min=1e-8).log().clamp(min=floor, max=20.0)
        log_w = log_w + segment_sum(torch.where(x.sampled, log_rho, 0.0), x.lengths)
    log_w = expand(log_w.clamp(min=floor, max=20.0), x.lengths)
    good = x.advantages >= 0
    k = torch.where(good, k_pos, k_neg)
    lam = torch.where(good, lambda_pos, lambda_neg)
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
    bounded = torch.where(
        x.advantages > 0,
        x.log_ratio.clamp(max=epsilon_high),
        torch.maximum(x.log_ratio, x.log_ratio.new_tensor(-epsilon_low)),
    )
    log_ratio = masked_segment_mean(bounded, x.sampled, x.lengths).clamp(max=MAX_LOG_RATIO)
    return -x.advantages * expand(log_ratio, x.lengths).exp()


def clip_stats(x: SurrogateInputs, *, low: float, high: float, per_sequence: bool = False) -> dict[str, Stat]:
    """Clip fractions: r < low where A < 0, r > high where A > 0, over trained tokens (or sequences).

    The minimum and the maximum are over completions, of the fraction of each completion's trained tokens, so that they
    do not depend on how a step is cut.
    """
    ratio = x.ratio.detach()
    is_low = ((ratio < low) & (x.advantages < 0) & x.sampled).to(ratio)
    is_high = ((ratio > high) & (x.advantages > 0) & x.sampled).to(ratio)
    trained = segment_sum(x.sampled.to(ratio), x.lengths) > 0
    low_of_each = masked_segment_mean(is_low, x.sampled, x.lengths)[trained]
    high_of_each = masked_segment_mean(is_high, x.sampled, x.lengths)[trained]
    if per_sequence:  # the ratio is constant over a sequence: its mean over the tokens is 0 or 1
        count: float = len(low_of_each) + x.skipped_rows
        is_low, is_high = low_of_each, high_of_each
    else:
        count = x.sampled.sum().item() + x.skipped_tokens
    if not count:
        return {}
    lows, highs = is_low.sum().item(), is_high.sum().item()
    unclipped = [0.0] if x.skipped_rows else []
    return {
        "clip_ratio/low_mean": Mean(lows, count),
        "clip_ratio/low_min": Min(min(low_of_each.tolist() + unclipped)),
        "clip_ratio/high_mean": Mean(highs, count),
        "clip_ratio/high_max": Max(max(high_of_each.tolist() + unclipped)),
        "clip_ratio/region_mean": Mean(lows + highs, count),
    }


def cispo_stats(x: SurrogateInputs, *, epsilon_high: float) -> dict[str, Stat]:
    """`cispo_clip_ratio`: fraction of trained tokens with A > 0 whose ratio is above the cap."""
    cut = (x.ratio.detach() > epsilon_high) & (x.advantages > 0) & x.sampled
    return {"cispo_clip_ratio": Mean(cut.sum().item(), x.sampled.sum().item() + x.skipped_tokens)}


def vespo_stats(x: SurrogateInputs, **kernel: float) -> dict[str, Stat]:
    """`vespo/phi_seq_mean`: the mean of φ over sequences."""
    phi = masked_segment_mean(vespo_phi(x, **kernel), x.sampled, x.lengths)
    trained = segment_sum(x.sampled.to(phi), x.lengths) > 0
    return {"vespo/phi_seq_mean": Mean(phi[trained].sum().item(), trained.sum().item())}
