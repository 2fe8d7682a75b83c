"""Terms of the loss besides the surrogate, by the config: a row of `TERMS` each (`covey.core.terms`)."""

from collections.abc import Callable
from typing import Any

from covey.core.terms import TokenTerm

TERMS: list[Callable[[Any], TokenTerm | None]] = []
"""Config -> a term, or None where the config asks for none."""


def terms(config: Any) -> tuple[TokenTerm, ...]:
    """The terms that a config asks for."""
    return tuple(term for make in TERMS if (term := make(config)) is not None)
