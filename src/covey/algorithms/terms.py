"""Terms of the loss besides the surrogate, by the config: a row of `TERMS` each (`covey.core.terms`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from covey.core.distillation import (
    GapAdvantage,
    TeacherAdvantage,
    added_gap,
    gap_stats,
    measured_gap,
    named_divergence,
    named_stats,
    sampled_divergence,
    tokens_with_a_teacher,
)
from covey.core.terms import Coefficient, TokenTerm, constant, peak_and_valley
from covey.runtime.import_path import resolve


def teacher_coefficient(config: Any) -> Coefficient:
    schedule = config.teacher_schedule
    if schedule is None:
        return constant(config.teacher_coef)
    return lambda step: config.teacher_coef * peak_and_valley(step, **schedule)


def teacher(config: Any) -> TokenTerm | None:
    """The divergence from a teacher, which is only measured where the gap is added to the advantages."""
    if config.teacher is None:
        return None
    stats = partial(gap_stats, clip=config.teacher_clip)
    if config.teacher_loss == "advantage":
        return TokenTerm("teacher", tokens_with_a_teacher, measured_gap, constant(0.0), stats)
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


TERMS: list[Callable[[Any], TokenTerm | None]] = [teacher]
"""Config -> a term, or None where the config asks for none."""


def terms(config: Any) -> tuple[TokenTerm, ...]:
    """The terms that a config asks for."""
    return tuple(term for make in TERMS if (term := make(config)) is not None)
