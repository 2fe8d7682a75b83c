"""Rules of a config: each is one function, named after what it guarantees.

A rule takes the config and raises `ValueError` for settings that cannot work, or warns about a setting without effect.
To add one, write the function into the module of its theme and put it into that module's `RULES`. The allowed values of
a single field stand at the field (`covey.config.groups`), divisibility in `covey.config.algebra`, and rules about the
arguments of a trainer (model, dataset, reward functions) in the trainer.
"""

import dataclasses
import numbers
from types import NoneType
from typing import TYPE_CHECKING, get_args, get_type_hints

from transformers import TrainingArguments

from covey.config.groups.describe import LIMITS, Limits
from covey.config.rules import engines, objective, sampling, training

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

RULES = (*training.RULES, *sampling.RULES, *objective.RULES, *engines.RULES)
"""All rules that need the batch sizes settled, in the order in which they are checked."""

INHERITED = {
    "per_device_train_batch_size": Limits(ge=1),
    "per_device_eval_batch_size": Limits(ge=1),
    "gradient_accumulation_steps": Limits(ge=1),
}
"""Limits of fields that transformers declares."""

MAY_BE_NONE = frozenset(field.name for field in dataclasses.fields(TrainingArguments))
"""Fields of transformers, some of which it lets be None whatever their type says."""


def check_fields(args: "OnlineConfig") -> None:
    """Check each field by itself, and what batch sizes are computed from.

    Raises:
        ValueError: a field that holds a number or a word holds another kind of value, or one outside of its limits.
    """
    hints = get_type_hints(type(args))
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name, None)
        limits = LIMITS.get(field) or INHERITED.get(name)
        _check_number(name, value, set(get_args(hints[name]) or [hints[name]]), limited=limits is not None)
        if limits is not None and value is not None:
            limits.check(name, value)
    for rule in training.BATCH_RULES:
        rule(args)


def _check_number(name: str, value: object, kinds: set[object], limited: bool) -> None:
    if not kinds - {NoneType} or not kinds <= {int, float, NoneType}:
        return
    if value is None and (NoneType in kinds or name in MAY_BE_NONE):
        return
    whole = float not in kinds
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or (limited and isinstance(value, bool)):
        quotes = " Write it without quotes, such as 1 or 1e-6." if isinstance(value, str) else ""
        kind = "whole number" if whole else "number"
        raise ValueError(f"{name}={value!r} must be a {kind}, but is a {type(value).__name__}.{quotes}")
    if value != value:
        raise ValueError(f"{name}=nan is not a number: give a number, or leave the field out for its default.")


def check(args: "OnlineConfig") -> None:
    """Run every rule on a config whose batch sizes are settled."""
    for rule in RULES:
        rule(args)
