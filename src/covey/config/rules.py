"""Rules of a config: each is one function, named after what it guarantees.

A rule raises `ValueError` for settings that cannot work, or warns about a setting without effect. To add one, write it
below the fields of its theme (`training`, `sampling`, `objective`, `engines`): every public function there is a rule.
"""

import dataclasses
import inspect
import numbers
import os
import re
from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, get_args, get_type_hints

from transformers import TrainingArguments

from covey.config import engines, objective, sampling, training
from covey.config.fields import LIMITS
from covey.runtime.safe_text import is_secret

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

RULES: "tuple[Callable[[OnlineConfig], None], ...]" = tuple(
    rule
    for theme in (training, sampling, objective, engines)
    for name, rule in vars(theme).items()
    if inspect.isfunction(rule) and rule.__module__ == theme.__name__ and not name.startswith("_")
)
MAY_BE_NONE = frozenset(field.name for field in dataclasses.fields(TrainingArguments))  # some are, whatever their type


def check_fields(args: "OnlineConfig") -> None:
    if not isinstance(args.output_dir, str | os.PathLike | None):
        raise ValueError(f"output_dir={args.output_dir!r} must be text: the name of a folder.")
    hints = get_type_hints(type(args))
    _check_within(args)
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name, None)
        limits = LIMITS.get(name)
        _check_number(name, value, set(get_args(hints[name]) or [hints[name]]))
        if limits is not None and value is not None:
            limits.check(name, value)


def _check_number(name: str, value: object, kinds: set[object]) -> None:
    if kinds - {NoneType} == {bool} and value not in (True, False, None):
        raise ValueError(f"{name}={value!r} must be True or False, without quotes: as it is, it would count as True.")
    if kinds - {NoneType} == {str} and not isinstance(value, str | bool | list | os.PathLike | None):
        shown = "..." if is_secret(name) else repr(value)
        raise ValueError(f"{name}={shown} must be text, but is a {type(value).__name__}.")
    if not kinds - {NoneType} or not kinds <= {int, float, NoneType}:
        return
    if value is None and (NoneType in kinds or name in MAY_BE_NONE):
        return
    whole = float not in kinds
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        advice = " Write it without quotes, such as 1 or 1.0e-6; YAML takes 1e-6 for text."
        kind = "whole number" if whole else "number"
        raise ValueError(
            f"{name}={value!r} must be a {kind}, but is a {type(value).__name__}.{advice * isinstance(value, str)}"
        )
    if value != value:
        raise ValueError(f"{name}=nan is not a number: give a number, or leave the field out for its default.")


def _check_within(args: "OnlineConfig") -> None:
    """Refuse NaN and infinity in the arguments of optimizers and schedulers, which few of them look at."""
    for name in ("optim_args", "lr_scheduler_kwargs"):
        if re.search(r"\b(nan|inf)\b", str(getattr(args, name)), re.IGNORECASE):
            raise ValueError(f"{name}={getattr(args, name)!r} holds NaN or infinity: give a finite number.")


def check_batch_settings(args: "OnlineConfig") -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process. Start one process per GPU "
            f"(accelerate launch --num_processes {args.n_gpu} script.py) or show one only (CUDA_VISIBLE_DEVICES=0)."
        )
    if args.num_generations is None or args.num_generations < 2:
        raise ValueError(
            f"num_generations={args.num_generations!r}: a completion is compared with the others of its prompt, so "
            "there must be at least 2; with 1 every advantage is 0 and nothing is learned. 4 to 16 are usual."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change per_device_train_batch_size, and with it how groups divide, in the "
            "middle of a run. Set per_device_train_batch_size yourself; `covey explain` estimates the memory."
        )
    if getattr(args.accelerator_config, "split_batches", False):  # transformers has parsed it
        raise ValueError(
            "accelerator_config with split_batches=True would cut groups apart. Leave it False: "
            "per_device_train_batch_size counts the completions of one process."
        )
