"""GRPO and the losses descended from it: one row of the table each.

A new published loss is a surrogate in `covey.core.losses` and a row here.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType
from covey.core.advantages import group_relative, normalize_then_sum, weighted_total
from covey.core.credit import CreditMix, Steps, steps_normalized_then_summed, steps_relative, steps_weighted
from covey.core.losses import (
    KL_ESTIMATORS,
    RATIO_LEVELS,
    SHARED_GRADIENT,
    Surrogate,
    SurrogateStats,
    cispo,
    cispo_stats,
    clip,
    clip_stats,
    gmpo,
    mean_constant_length,
    mean_over_update,
    mean_per_micro_batch,
    mean_per_sequence,
    sapo,
    sum_per_sequence,
    token_level,
    vespo,
    vespo_stats,
)
from covey.core.objective import Objective


def _clip(config: Any) -> Surrogate:
    return partial(clip, epsilon_low=config.epsilon, epsilon_high=config.resolved_epsilon_high, delta=config.delta)


def _clip_stats(config: Any) -> SurrogateStats:
    return partial(
        clip_stats,
        low=1 - config.epsilon,
        high=1 + config.resolved_epsilon_high,
        per_sequence=config.importance_sampling_level in ("sequence", "sequence_sum"),
    )


def _cispo(config: Any) -> Surrogate:
    return partial(cispo, epsilon_high=config.resolved_epsilon_high)


def _cispo_stats(config: Any) -> SurrogateStats:
    return partial(cispo_stats, epsilon_high=config.resolved_epsilon_high)


def _sapo(config: Any) -> Surrogate:
    return partial(sapo, temperature_pos=config.sapo_temperature_pos, temperature_neg=config.sapo_temperature_neg)


def _vespo_kernel(config: Any) -> dict[str, Any]:
    return {
        "k_pos": config.vespo_k_pos,
        "lambda_pos": config.vespo_lambda_pos,
        "k_neg": config.vespo_k_neg,
        "lambda_neg": config.vespo_lambda_neg,
    }


def _vespo(config: Any) -> Surrogate:
    return partial(vespo, **_vespo_kernel(config))


def _vespo_stats(config: Any) -> SurrogateStats:
    return partial(vespo_stats, **_vespo_kernel(config))


def _gmpo(config: Any) -> Surrogate:
    return partial(gmpo, epsilon_low=config.epsilon, epsilon_high=config.resolved_epsilon_high)


EPSILONS = frozenset({"epsilon", "epsilon_high"})
BOUNDS = EPSILONS | {"delta"}

for _name, _row in {
    "grpo": LossType(_clip, mean_per_sequence, _clip_stats, reads=BOUNDS),
    "bnpo": LossType(_clip, mean_per_micro_batch, _clip_stats, reads=BOUNDS),
    "dr_grpo": LossType(_clip, mean_constant_length, _clip_stats, reads=BOUNDS),
    "dapo": LossType(_clip, mean_over_update, _clip_stats, reads=BOUNDS),
    "luspo": LossType(_clip, sum_per_sequence, _clip_stats, reads=BOUNDS),
    "cispo": LossType(_cispo, mean_over_update, _cispo_stats, credits_tokens=True, reads=frozenset({"epsilon_high"})),
    "sapo": LossType(_sapo, mean_per_sequence, reads=frozenset({"sapo_temperature_pos", "sapo_temperature_neg"})),
    "vespo": LossType(
        _vespo,
        mean_over_update,
        _vespo_stats,
        mismatch_in_surrogate=True,
        credits_tokens=True,
        reads=frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}),
    ),
    "gmpo": LossType(_gmpo, mean_per_sequence, ratio_level=token_level, credits_tokens=False, reads=EPSILONS),
}.items():
    LOSS_TYPES.register(_name, _row)


def objective(config: Any, *, kl_in_reward: bool = False) -> Objective:
    """The loss that a config describes."""
    row = LOSS_TYPES[config.loss_type]
    level = row.ratio_level or RATIO_LEVELS[config.importance_sampling_level]
    return Objective(
        surrogate=row.surrogate(config),
        stats=row.stats(config) if row.stats else None,
        ratio_level=level,
        credits_tokens=level not in SHARED_GRADIENT if row.credits_tokens is None else row.credits_tokens,
        beta=0.0 if kl_in_reward else config.beta,
        kl=KL_ESTIMATORS[config.kl_estimator],
        correct_kl_bias=config.use_bias_correction_kl,
        off_policy_threshold=config.off_policy_mask_threshold,
        mismatch_in_surrogate=row.mismatch_in_surrogate,
        zero_without_advantage=row.zero_without_advantage,
    )


def algorithm(config: Any) -> Algorithm:
    """GRPO as `config` (a `GRPOConfig`) sets it."""
    return Algorithm(
        name="GRPO",
        advantages=partial(_advantages, aggregation=config.multi_objective_aggregation, scale=config.scale_rewards),
        step_advantages=partial(
            _step_advantages,
            aggregation=config.multi_objective_aggregation,
            scale=config.scale_rewards,
            compared_with=config.step_baseline,
        ),
        mix=credit_mix(config),
        objective=objective(config),
        weighting=LOSS_TYPES[config.loss_type].weighting,
        kl_in_reward=False,
        beta=config.beta,
    )


def credit_mix(config: Any) -> CreditMix:
    """Weights of the credit of steps and of outcomes."""
    return CreditMix(config.process_weight, config.outcome_weight, config.step_discount)


def _advantages(
    rewards_PGF: Tensor, weights_F: Tensor, kl_PG: Tensor | None, *, aggregation: str, scale: str
) -> Tensor:
    if aggregation == "normalize_then_sum":
        return normalize_then_sum(rewards_PGF, weights_F)
    return group_relative(weighted_total(rewards_PGF, weights_F), scale)


def _step_advantages(
    parts: Sequence[Steps], weights_F: Tensor, groups_B: Tensor, *, aggregation: str, scale: str, compared_with: str
) -> Tensor:
    if aggregation == "normalize_then_sum":
        return steps_normalized_then_summed(parts, weights_F, groups_B, compared_with=compared_with)
    baseline = partial(steps_relative, scale=scale, compared_with=compared_with)
    return steps_weighted(parts, weights_F, groups_B, baseline=baseline)
