"""RLOO: REINFORCE with a leave-one-out baseline, the KL penalty in the reward, a completion as one action.

It differs from GRPO by values alone: the baseline, where the KL acts, and the ratio of whole sequences. On-policy the
clipped form below reduces to REINFORCE: the ratio is 1 and its gradient is that of log π(o_i).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType
from covey.algorithms.grpo import EPSILONS, credit_mix, objective
from covey.core.advantages import leave_one_out, weighted_total
from covey.core.credit import Steps, steps_leave_one_out, steps_weighted
from covey.core.losses import Surrogate, SurrogateStats, clip, clip_stats, mean_per_sequence, sequence_sum_level


def _clip(config: Any) -> Surrogate:
    return partial(clip, epsilon_low=config.epsilon, epsilon_high=config.resolved_epsilon_high)


def _clip_stats(config: Any) -> SurrogateStats:
    return partial(clip_stats, low=1 - config.epsilon, high=1 + config.resolved_epsilon_high, per_sequence=True)


# With one advantage a rollout the token losses are all equal to the rollout's, so their mean is the rollout's loss.
LOSS_TYPES.register(
    "rloo", LossType(_clip, mean_per_sequence, _clip_stats, ratio_level=sequence_sum_level, reads=EPSILONS)
)


def algorithm(config: Any) -> Algorithm:
    """RLOO as `config` (an `RLOOConfig`) sets it."""
    return Algorithm(
        name="RLOO",
        advantages=partial(
            _advantages,
            clip_range=config.reward_clip_range,
            beta=config.beta,
            normalize=config.normalize_advantages,
        ),
        step_advantages=partial(
            _step_advantages,
            clip_range=config.reward_clip_range,
            normalize=config.normalize_advantages,
            compared_with=config.step_baseline,
        ),
        mix=credit_mix(config),
        objective=objective(config, kl_in_reward=True),
        weighting=LOSS_TYPES[config.loss_type].weighting,
        kl_in_reward=True,
        beta=config.beta,
    )


def _advantages(
    rewards_PGF: Tensor,
    weights_F: Tensor,
    kl_PG: Tensor | None,
    *,
    clip_range: tuple[float, float] | None,
    beta: float,
    normalize: bool,
) -> Tensor:
    """R = clip(Σ w r) - β KL(π_old || π_ref) of the whole completion, then leave one out."""
    total_PG = weighted_total(rewards_PGF, weights_F)
    if clip_range is not None:
        total_PG = total_PG.clamp(*clip_range)
    if kl_PG is not None:
        total_PG = total_PG - beta * kl_PG
    return leave_one_out(total_PG, normalize)


def _step_advantages(
    parts: Sequence[Steps],
    weights_F: Tensor,
    groups_B: Tensor,
    *,
    clip_range: tuple[float, float] | None,
    normalize: bool,
    compared_with: str,
) -> Tensor:
    """Each step's reward clipped, then the steps of the completion left out. The KL is the outcome's alone."""
    if clip_range is not None:
        parts = [part._replace(rewards=part.rewards.clamp(*clip_range)) for part in parts]
    baseline = partial(steps_leave_one_out, normalize=normalize, compared_with=compared_with)
    return steps_weighted(parts, weights_F, groups_B, baseline=baseline)
