"""Looks at a dataset before training starts, so that a mistake is an error now and not an hour later."""

import difflib
from itertools import islice
from typing import Any

from covey.rollout.prompts import is_conversational

LOOKED_AT = 16
"""Rows whose prompts are checked."""


def check_dataset(dataset: Any, role: str) -> None:
    """Refuse what cannot be trained or evaluated on.

    Args:
        dataset: a `datasets.Dataset`, an iterable dataset, or a sequence of rows.
        role: "train_dataset" or "eval_dataset", for the message.

    Raises:
        ValueError: nothing in it, no `prompt` column, or prompts of the wrong kind.
    """
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError(f"`{role}` is empty. Give at least one row with a 'prompt' column.")
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"`{role}` must be a dataset of rows with a 'prompt' column, got {type(dataset).__name__}. Load it first,"
            " e.g. with `datasets.load_dataset`."
        )
    kinds = set()
    for number, row in enumerate(first_rows(dataset)):
        kinds.add(_check_row(row, number, role))
    if len(kinds) > 1:
        raise ValueError(
            f"`{role}` mixes conversational prompts (lists of messages) with plain strings; reward functions could not"
            " know what they receive. Use one kind."
        )


def first_rows(dataset: Any) -> list[Any]:
    """A few rows of a dataset with or without a length."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return [dataset[i] for i in range(min(LOOKED_AT, len(dataset)))]
    return list(islice(iter(dataset), LOOKED_AT))


def _check_row(row: Any, number: int, role: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"row {number} of `{role}` must be a dictionary of columns, got {type(row).__name__}.")
    if "prompt" not in row:
        close = difflib.get_close_matches("prompt", [str(c) for c in row], n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}? Rename it to 'prompt'." if close else ""
        raise ValueError(f"`{role}` has no 'prompt' column; its columns are {sorted(map(str, row))}.{hint}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"the prompt of row {number} of `{role}` is an empty string. Remove such rows.")
        return "standard"
    if is_conversational(prompt) and all("content" in message for message in prompt):
        return "conversational"
    raise ValueError(
        f"the prompt of row {number} of `{role}` must be a string or a non-empty list of messages with 'role' and"
        f" 'content', got {prompt!r:.200}."
    )
