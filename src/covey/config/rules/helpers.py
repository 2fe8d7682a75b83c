"""What rules are written with."""

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Iterable
from typing import Any


def is_set(args: Any, name: str) -> bool:
    """Whether field `name` differs from its default."""
    default = next(field.default for field in dataclasses.fields(args) if field.name == name)
    return getattr(args, name) != default


def closest(value: Any, allowed: Iterable[str]) -> str:
    """A sentence that proposes the allowed word most like `value`, or nothing where none is."""
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def warn(message: str, frames: int = 6) -> None:
    """Warn at the line that made the config."""
    warnings.warn(
        message, UserWarning, stacklevel=frames + 1
    )  # warn, rule, check, __post_init__, __init__, __call__, user


def ignored(args: Any, names: Iterable[str], because: str) -> None:
    """Warn about each named field that was set although it does nothing."""
    for name in names:
        if is_set(args, name):
            value = "..." if name.endswith("_api_key") else repr(getattr(args, name))
            warn(f"`{name}={value}` has no effect: {because}.", frames=7)


def within(args: Any, name: str, allowed: str, fits: Callable[[float], bool], advice: str) -> None:
    """Refuse a value of field `name` that does not fit; unset is fine."""
    value = getattr(args, name)
    if value is not None and not fits(value):
        raise ValueError(f"{name}={value!r} is out of range: it must be {allowed}. {advice}")
