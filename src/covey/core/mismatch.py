"""Corrections of samples from a policy other than the trained one: importance weights, filters of drifted sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

from covey.core.batch import expand, masked_segment_mean, segment_starts, segment_sum
from covey.core.losses import MAX_LOG_RATIO, largest
from covey.core.stats import Max, Mean, Min, Stat

MismatchCorrection = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Stat]]]
"""(trainer's logprobs [N], engine's logprobs [N], sampled [N], lengths [B]) -> weights and metrics: `mismatch_weights`
with its mode and bounds filled in, alone or `rejecting` sequences."""


def mismatch_weights(
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    sampled: Tensor,
    lengths: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> tuple[Tensor, dict[str, Stat]]:
    """Importance weights [N] of the trainer's policy over the engine's, whose samples they correct, and their metrics.

    ρ = exp(log π_trainer - log π_engine), per token or summed over the sequence, then either truncated to
    [clip_min, clip_max] or set to 0 outside it. Truncated importance sampling: Ionides 2008 and, for engines, Yao et
    al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Masked: Liu et al. 2025, "When
    speed kills stability" (sequences), and IcePop (tokens, with both bounds; Ring-1T, arXiv 2510.18855).

    `mode`: token_truncate | token_mask | sequence_truncate | sequence_mask. An engine's NaN or -inf counts as no
    difference; tokens that were not sampled get weight 1, or their sequence's.
    """
    level, _, action = mode.partition("_")
    difference = _difference(old_logprobs, engine_logprobs, sampled)
    log_rho = expand(segment_sum(difference, lengths), lengths, len(sampled)) if level == "sequence" else difference
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low = 0.0 if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    outside = (rho < low) | (rho > high)
    weights = rho.clamp(min=low, max=high) if action == "truncate" else torch.where(outside, 0.0, rho)
    return weights, _mismatch_stats(difference.abs(), weights, outside, sampled, lengths, level)


def rejecting(weigh: MismatchCorrection | None, low: float | None, high: float | None) -> MismatchCorrection:
    """A correction that gives weight 0 to sequences whose ratios have a geometric mean outside [low, high].

    ρ̄_i = exp(mean_t(log π_trainer - log π_engine)) over the sampled tokens of sequence i, which does not grow with the
    sequence's length. Sequences inside get the weights of `weigh`, or 1 without one. A bound of None is no bound. Liu
    et al. 2025, "When speed kills stability", part 3; `seq_mean_k1` of verl and `geo_mask` of earlier prime-rl.
    """
    prefix, bounds = "sampling/geometric_ratio", (0.0 if low is None else low, float("inf") if high is None else high)

    def correct(
        old_logprobs: Tensor, engine_logprobs: Tensor, sampled: Tensor, lengths: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        difference = _difference(old_logprobs, engine_logprobs, sampled)
        mean = masked_segment_mean(difference, sampled, lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [B]
        outside = (mean < bounds[0]) | (mean > bounds[1])
        weights, stats = torch.ones_like(difference), dict[str, Stat]()
        if weigh is not None:
            weights, stats = weigh(old_logprobs, engine_logprobs, sampled, lengths)
        counted = segment_sum(sampled.long(), lengths) > 0
        sequences = counted.sum()
        stats = {
            **stats,
            f"{prefix}/min": Min(-largest(-mean, counted)),
            f"{prefix}/mean": Mean(torch.where(counted, mean, 0.0).sum(), sequences),
            f"{prefix}/max": Max(largest(mean, counted)),
            f"{prefix}/outside": Mean((outside & counted).sum(), sequences),
        }
        return torch.where(expand(outside, lengths, len(sampled)), 0.0, weights), stats

    return correct


def _difference(old_logprobs: Tensor, engine_logprobs: Tensor, sampled: Tensor) -> Tensor:
    """log π_trainer - log π_engine [N] of sampled tokens; 0 for others and where the engine gives no number."""
    difference = (old_logprobs - engine_logprobs).nan_to_num(nan=0.0, posinf=0.0, neginf=-MAX_LOG_RATIO)
    return torch.where(sampled, difference, 0.0)


def _mismatch_stats(
    gap: Tensor, weights: Tensor, outside: Tensor, sampled: Tensor, lengths: Tensor, level: str
) -> dict[str, Stat]:
    tokens, seen, beyond, counted = sampled.sum(), weights, outside, sampled
    if level == "sequence":  # one ratio per sequence, which all its tokens have
        first = segment_starts(lengths).clamp(max=max(len(sampled) - 1, 0))
        seen, beyond = (values[first] if len(sampled) else values for values in (weights, outside))
        counted = segment_sum(sampled.long(), lengths)[: len(seen)] > 0
    ratios, prefix = counted.sum(), "sampling/importance_sampling_ratio"
    return {
        "sampling/sampling_logp_difference/mean": Mean(torch.where(sampled, gap, 0.0).sum(), tokens),
        "sampling/sampling_logp_difference/max": Max(largest(gap, sampled)),
        f"{prefix}/min": Min(-largest(-seen, counted)),
        f"{prefix}/mean": Mean(torch.where(counted, seen, 0.0).sum(), ratios),
        f"{prefix}/max": Max(largest(seen, counted)),
        f"{prefix}/outside": Mean((beyond & counted).sum(), ratios),
    }


def off_policy_keep(
    advantages: Tensor, logprobs: Tensor, behaviour_logprobs: Tensor, sampled: Tensor, lengths: Tensor, threshold: float
) -> Tensor:
    """Mask of the tokens to keep: all but those of punished sequences that have drifted too far off-policy.

    keep_i = A_i >= 0 or mean_t(log π_behaviour - log π) <= threshold (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).
    NaN log-probs of the engine count as no drift. Returns bool [N].
    """
    drift = (behaviour_logprobs - logprobs.detach()).nan_to_num(0.0)
    return (advantages >= 0) | (
        expand(masked_segment_mean(drift, sampled, lengths), lengths, len(sampled)) <= threshold
    )
