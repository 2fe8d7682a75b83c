"""Further terms of the loss (`covey.core.terms`), made from the config: one function of `TERMS` each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from covey.core.distillation import (
    WHOLE_VOCABULARY,
    GapAdvantage,
    TeacherAdvantage,
    added_gap,
    gap_stats,
    measured_gap,
    named_divergence,
    named_stats,
    sampled_divergence,
    tokens_with_a_teacher,
    vocabulary_divergence,
)
from covey.core.supervision import DEMONSTRATIONS, cross_entropy, tokens_of_writers, weighted_cross_entropy
from covey.core.terms import Coefficient, TokenTerm, constant, peak_and_valley
from covey.runtime.import_path import resolve


def teacher_coefficient(config: Any) -> Coefficient:
    schedule = config.teacher_schedule
    if schedule is None:
        return constant(config.teacher_coef)
    return lambda step: config.teacher_coef * peak_and_valley(step, **schedule)


def teacher(config: Any) -> TokenTerm | None:
    """The divergence from a teacher. With teacher_loss="advantage" it has weight 0 and is only measured."""
    if config.teacher is None:
        return None
    stats = partial(gap_stats, clip=config.teacher_clip)
    if config.teacher_loss == "advantage":
        return TokenTerm("teacher", tokens_with_a_teacher, measured_gap, constant(0.0), stats)
    if config.teacher_top_k == WHOLE_VOCABULARY:
        coef = teacher_coefficient(config)
        beta = config.teacher_beta
        return TokenTerm("teacher", tokens_with_a_teacher, vocabulary_divergence, coef, gap_stats, beta=beta)
    if config.teacher_top_k:
        value = partial(named_divergence, beta=config.teacher_beta)
        coef = teacher_coefficient(config)
        return TokenTerm("teacher", tokens_with_a_teacher, value, coef, named_stats, reads_named=True)
    value = partial(sampled_divergence, clip=config.teacher_clip)
    return TokenTerm("teacher", tokens_with_a_teacher, value, teacher_coefficient(config), stats)


def teacher_advantage(config: Any) -> TeacherAdvantage | None:
    """The teacher's part of the advantages, or None."""
    if config.teacher is None or config.teacher_loss != "advantage":
        return None
    own: GapAdvantage = added_gap
    if config.teacher_advantage is not None:
        own = resolve(config.teacher_advantage, "teacher_advantage")
    return TeacherAdvantage(own, teacher_coefficient(config), config.teacher_clip)


def supervised(config: Any) -> TokenTerm | None:
    """Cross-entropy on the tokens of rollouts that the policy did not write (ECHO, arXiv 2605.24517)."""
    if config.supervised_roles is None:
        return None
    return TokenTerm("supervised", tokens_of_writers(config.supervised_roles), cross_entropy, lambda step: 1.0)


def demonstrations_coefficient(config: Any) -> Coefficient:
    """Weight of the demonstrations in each step; with a schedule it is μ, and surrogate and KL term have 1 - μ."""
    if config.demonstrations_schedule is None:
        return constant(config.demonstrations_coef)
    return lambda step: peak_and_valley(step, **config.demonstrations_schedule)


def demonstrations(config: Any) -> TokenTerm | None:
    """Cross-entropy on demonstrations (CHORD, arXiv 2508.11408)."""
    if config.demonstrations is None:
        return None
    value = weighted_cross_entropy if config.demonstrations_phi else cross_entropy
    return TokenTerm(DEMONSTRATIONS, None, value, demonstrations_coefficient(config))


def surrogate_coefficient(config: Any) -> Coefficient | None:
    """Common weight of surrogate and KL term: 1 - μ with a schedule of demonstrations, else None, which is 1."""
    if config.demonstrations is None or config.demonstrations_schedule is None:
        return None
    mu = demonstrations_coefficient(config)
    return lambda step: 1.0 - mu(step)


TERMS: list[Callable[[Any], TokenTerm | None]] = [teacher, supervised, demonstrations]
"""Config -> a term, or None where the config asks for none."""


def terms(config: Any) -> tuple[TokenTerm, ...]:
    """The terms that a config asks for."""
    return tuple(term for make in TERMS if (term := make(config)) is not None)
