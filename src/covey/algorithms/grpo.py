"""GRPO and the losses derived from it: one row of the table of losses each.

A new published loss is a surrogate in `covey.core.losses` and a row here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType, Members
from covey.algorithms.comparison import RolloutComparison
from covey.algorithms.registered import registered_advantages
from covey.algorithms.terms import surrogate_coefficient, teacher_advantage, terms
from covey.core import losses
from covey.core.advantages import group_relative, normalize_then_sum, weighted_total
from covey.core.credit import CreditMix, Steps, steps_normalized_then_summed, steps_relative, steps_weighted
from covey.core.objective import Objective

EPSILONS = frozenset({"epsilon", "epsilon_high"})
BOUNDS = EPSILONS | {"delta"}
VESPO = {name[6:]: name for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")}


def with_fields(function: Callable[..., Any], **fields: str) -> Callable[[Any], Any]:
    """A function of a config that binds keyword arguments of `function` to fields of that config."""
    return lambda config: partial(function, **{name: getattr(config, field) for name, field in fields.items()})


with_epsilons = partial(with_fields, epsilon_low="epsilon", epsilon_high="resolved_epsilon_high")


def clip_fractions(config: Any) -> losses.SurrogateStats:
    """Metrics of clipping, counted per sequence where all tokens of a sequence have one ratio, else per token."""
    per_sequence = ratio_level(config) in (losses.sequence_level, losses.sequence_sum_level)
    low, high = 1 - config.epsilon, 1 + config.resolved_epsilon_high
    return partial(losses.clip_stats, low=low, high=high, per_sequence=per_sequence)


_clip = with_epsilons(losses.clip, delta="delta")
for _name, _row in {
    "grpo": LossType(_clip, losses.mean_per_sequence, clip_fractions, reads=BOUNDS),
    "bnpo": LossType(_clip, losses.mean_per_micro_batch, clip_fractions, reads=BOUNDS),
    "dr_grpo": LossType(_clip, losses.mean_constant_length, clip_fractions, reads=BOUNDS),
    "dapo": LossType(_clip, losses.mean_over_update, clip_fractions, reads=BOUNDS),
    "luspo": LossType(_clip, losses.sum_per_sequence, clip_fractions, reads=BOUNDS),
    "cispo": LossType(
        with_fields(losses.cispo, epsilon_high="resolved_epsilon_high"),
        losses.mean_over_update,
        with_fields(losses.cispo_stats, epsilon_high="resolved_epsilon_high"),
        credits_tokens=True,
        reads=frozenset({"epsilon_high"}),
    ),
    "sapo": LossType(
        with_fields(losses.sapo, temperature_pos="sapo_temperature_pos", temperature_neg="sapo_temperature_neg"),
        losses.mean_per_sequence,
        reads=frozenset({"sapo_temperature_pos", "sapo_temperature_neg"}),
    ),
    "vespo": LossType(
        with_fields(losses.vespo, **VESPO),
        losses.mean_over_update,
        with_fields(losses.vespo_stats, **VESPO),
        mismatch_in_surrogate=True,
        credits_tokens=True,
        reads=frozenset(VESPO.values()),
    ),
    "gmpo": LossType(
        with_epsilons(losses.gmpo),
        losses.mean_per_sequence,
        ratio_level=losses.token_level,
        credits_tokens=False,
        reads=EPSILONS,
    ),
}.items():
    LOSS_TYPES.register(_name, _row)


def ratio_level(config: Any) -> losses.RatioLevel:
    """The level that the loss prescribes, or the config's."""
    return LOSS_TYPES[config.loss_type].ratio_level or losses.RATIO_LEVELS[config.importance_sampling_level]


def objective(config: Any, *, kl_in_reward: bool = False) -> Objective:
    row = LOSS_TYPES[config.loss_type]
    level = ratio_level(config)
    return Objective(
        surrogate=row.surrogate(config),
        stats=row.stats(config) if row.stats else None,
        ratio_level=level,
        # a ratio of the whole sequence mixes the gradients of its tokens, so they cannot have advantages of their own
        credits_tokens=level is not losses.sequence_level if row.credits_tokens is None else row.credits_tokens,
        beta=0.0 if kl_in_reward else config.beta,
        kl=losses.KL_ESTIMATORS[config.kl_estimator],
        correct_kl_bias=config.use_bias_correction_kl,
        off_policy_threshold=config.off_policy_mask_threshold,
        mismatch_in_surrogate=row.mismatch_in_surrogate,
        zero_without_advantage=row.zero_without_advantage,
        needs_entropies=row.needs_entropies,
        choice=row.choice(config) if row.choice else None,
    )


def method(
    name: str, config: Any, totals: Any, advantages: Any, step_advantages: Any, *, kl_in_reward: bool, scaled: bool
) -> Algorithm:
    """An `Algorithm` from a method's functions for total rewards and advantages; the rest is read from the config.

    The functions have the config as their first argument. `scaled`: with compare='role_average', divide advantages by
    the standard deviation of each role in the batch.
    """
    return Algorithm(
        name=name,
        totals=partial(totals, config),
        advantages=partial(advantages, config),
        step_advantages=partial(step_advantages, config),
        mix=CreditMix(config.process_weight, config.outcome_weight, config.step_discount),
        objective=replace(
            objective(config, kl_in_reward=kl_in_reward),
            terms=terms(config),
            teacher=teacher_advantage(config),
            surrogate_coef=surrogate_coefficient(config),
        ),
        weighting=LOSS_TYPES[config.loss_type].weighting,
        kl_in_reward=kl_in_reward,
        beta=config.beta,
        reads_members=bool(config.advantages),
        token_baseline=config.advantages == "otb",
        comparison=RolloutComparison.of(config, scaled),
    )


def algorithm(config: Any) -> Algorithm:
    """GRPO as `config` (a `GRPOConfig`) sets it."""
    scaled = config.scale_rewards == "batch"
    parts = (_totals, _advantages, _step_advantages)
    return method("GRPO", config, *parts, kl_in_reward=config.kl_in_reward, scaled=scaled)


def _totals(config: Any, rewards: Tensor, weights_F: Tensor, kl: Tensor | None) -> Tensor:
    total = weighted_total(rewards, weights_F)
    return total if kl is None else total - config.beta * kl


def compared(config: Any, total_PG: Tensor, rewards_PGF: Tensor, members: tuple[Members, ...], usual: Any) -> Tensor:
    """Advantages of total rewards: by the function that `config.advantages` names, else the method's `usual` one."""
    return registered_advantages(config, total_PG, rewards_PGF, *members) if config.advantages else usual(total_PG)


def _advantages(config: Any, rewards_PGF: Tensor, weights_F: Tensor, kl_PG: Tensor | None, *members: Members) -> Tensor:
    if config.multi_objective_aggregation == "normalize_then_sum":
        return normalize_then_sum(rewards_PGF, weights_F)
    usual = partial(group_relative, scale=config.scale_rewards)
    return compared(config, _totals(config, rewards_PGF, weights_F, kl_PG), rewards_PGF, members, usual)


def _step_advantages(config: Any, parts: Sequence[Steps], weights_F: Tensor, groups_B: Tensor) -> Tensor:
    if config.multi_objective_aggregation == "normalize_then_sum":
        return steps_normalized_then_summed(parts, weights_F, groups_B, compared_with=config.step_baseline)
    baseline = partial(steps_relative, scale=config.scale_rewards, compared_with=config.step_baseline)
    return steps_weighted(parts, weights_F, groups_B, baseline=baseline)
