"""Rules about plain numbers and the outer training loop."""

import dataclasses
import math
import numbers
from types import NoneType
from typing import Any, get_args, get_type_hints

from transformers import TrainingArguments

from covey.config.rules.helpers import within

MAY_BE_NONE = frozenset(field.name for field in dataclasses.fields(TrainingArguments))
"""Fields of transformers, some of which it lets be None whatever their type says."""


def numbers_are_numbers(args: Any) -> None:
    """A field that holds a number holds one: not text, as run files and forms tend to give."""
    for name, hint in get_type_hints(type(args)).items():
        kinds = set(get_args(hint) or [hint])
        value = getattr(args, name, None)
        if not kinds - {NoneType} or not kinds <= {int, float, NoneType}:
            continue
        if value is None and (NoneType in kinds or name in MAY_BE_NONE):
            continue
        whole = float not in kinds
        if not isinstance(value, numbers.Integral if whole else numbers.Real):
            quotes = " Write it without quotes, such as 1 or 1e-6." if isinstance(value, str) else ""
            kind = "whole number" if whole else "number"
            raise ValueError(f"{name}={value!r} must be a {kind}, but is a {type(value).__name__}.{quotes}")
        if value != value:
            raise ValueError(f"{name}=nan is not a number: give a number, or leave the field out for its default.")


def learning_rate_goes_downhill(args: Any) -> None:
    """The learning rate is a finite step against the gradient."""
    within(
        args,
        "learning_rate",
        "0 or more, and finite",
        lambda rate: 0 <= rate < math.inf,
        "1e-6 to 1e-5 are usual, ten times that for an adapter.",
    )


def something_is_trained(args: Any) -> None:
    """The run lasts for some steps."""
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps}: nothing would be trained. Set"
            " one of them above 0; max_steps wins unless it is -1."
        )


def optimizer_waits_for_the_whole_step(args: Any) -> None:
    """The weights change once all passes of an optimizer step have been run, not within a backward pass."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
        raise ValueError(
            f"optim={name!r} changes the weights within every backward pass, but one optimizer step takes several"
            " passes here, whose gradients belong to the same weights. Choose another optimizer, such as adamw_torch,"
            " adafactor or galore_adamw."
        )


def embeddings_are_without_noise(args: Any) -> None:
    """What is sampled and what is scored see the same embeddings."""
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha!r} adds noise to the embeddings, for supervised training."
            " Here completions would be sampled and scored by models that differ by noise. Leave it unset."
        )
