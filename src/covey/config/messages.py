"""Warnings about settings at the user's own line, and proposals of known names."""

import dataclasses
import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from covey.runtime.safe_text import without_secrets


def closest(value: Any, allowed: Iterable[str]) -> str:
    """A sentence that proposes the allowed word most like `value`; empty if none is alike."""
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that made the config or the trainer, however deep the caller is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", ""), frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str, code: Any) -> bool:
    # The `__init__` that dataclasses generate for a class of the user's stands in the user's module.
    generated = code.co_name == "__init__" and code.co_filename == "<string>"
    return module.partition(".")[0] == "covey" or generated


def default_of(kind: Any, name: str) -> Any:
    field = kind.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_set(args: Any, name: str) -> bool:
    """True if a field has another value than its default, by the user rather than by the construction itself."""
    return name in args.given and getattr(args, name) != default_of(type(args), name)


def ignored(args: Any, names: Iterable[str], because: str) -> None:
    for name in names:
        if is_set(args, name):
            value = "..." if name.endswith("_api_key") else repr(without_secrets(getattr(args, name)))
            warn(f"`{name}={value}` has no effect: {because}.")
