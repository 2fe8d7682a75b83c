"""Findings about settings without effect, and proposals of known names."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from covey.core.findings import Finding
from covey.runtime.safe_text import without_secrets


def closest(value: Any, allowed: Iterable[str]) -> str:
    """A sentence that proposes the allowed word most like `value`; empty if none is alike."""
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def default_of(kind: Any, name: str) -> Any:
    field = kind.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_set(args: Any, name: str) -> bool:
    """True if a field has another value than its default, by the user rather than by the construction itself."""
    return args.was_given(name) and getattr(args, name) != default_of(type(args), name)


def ignored(args: Any, names: Iterable[str], because: str) -> Iterator[Finding]:
    for name in names:
        if is_set(args, name):
            value = "..." if name.endswith("_api_key") else repr(without_secrets(getattr(args, name)))
            yield Finding.warning("setting-unread", f"`{name}={value}` has no effect: {because}.")
