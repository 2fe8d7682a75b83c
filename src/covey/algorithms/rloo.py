"""RLOO: REINFORCE with a leave-one-out baseline, the KL penalty in the reward, a completion as one action.

On-policy the clipped form below reduces to REINFORCE: the ratio is 1 and its gradient is that of log π(o_i).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType, Members
from covey.algorithms.grpo import EPSILONS, clip_fractions, compared, method, with_epsilons
from covey.core.advantages import leave_one_out, weighted_total
from covey.core.credit import Steps, steps_leave_one_out, steps_weighted
from covey.core.losses import clip, mean_per_sequence, sequence_sum_level

# If all tokens of a rollout have one advantage, each token's loss is the rollout's loss, and so is their mean.
LOSS_TYPES.register(
    "rloo",
    LossType(with_epsilons(clip), mean_per_sequence, clip_fractions, ratio_level=sequence_sum_level, reads=EPSILONS),
)


def algorithm(config: Any) -> Algorithm:
    """RLOO as `config` (an `RLOOConfig`) sets it."""
    parts = (_totals, _advantages, _step_advantages)
    return method("RLOO", config, *parts, kl_in_reward=True, scaled=config.normalize_advantages)


def _totals(config: Any, rewards: Tensor, weights_F: Tensor, kl: Tensor | None) -> Tensor:
    """R = clip(Σ w r) - β KL(π_old || π_ref) of the whole completion."""
    total = weighted_total(rewards, weights_F)
    if config.reward_clip_range is not None:
        total = total.clamp(*config.reward_clip_range)
    return total if kl is None else total - config.beta * kl


def _advantages(config: Any, rewards_PGF: Tensor, weights_F: Tensor, kl_PG: Tensor | None, *members: Members) -> Tensor:
    usual = partial(leave_one_out, normalize=config.normalize_advantages)
    return compared(config, _totals(config, rewards_PGF, weights_F, kl_PG), rewards_PGF, members, usual)


def _step_advantages(config: Any, parts: Sequence[Steps], weights_F: Tensor, groups_B: Tensor) -> Tensor:
    """Clip each step's reward, then compare it with other completions' steps; the KL penalty is in the outcome."""
    if config.reward_clip_range is not None:
        parts = [part._replace(rewards=part.rewards.clamp(*config.reward_clip_range)) for part in parts]
    normalize, compared_with = config.normalize_advantages, config.step_baseline
    baseline = partial(steps_leave_one_out, normalize=normalize, compared_with=compared_with)
    return steps_weighted(parts, weights_F, groups_B, baseline=baseline)
