"""What an environment offers: which of its methods are tools, and which columns its `reset` takes."""

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

NOT_TOOLS = frozenset({"reset", "step", "close", "get_reward"})
"""Public methods that the library calls, and not the policy."""


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """The public methods of an object, in the order in which its class and then its bases define them.

    Properties, attributes that happen to be callable, and what is in `NOT_TOOLS` are left out.
    """
    names = {
        name: None
        for base in type(environment).__mro__
        if base is not object
        for name, value in vars(base).items()
        if not name.startswith("_")
        and name not in NOT_TOOLS
        and isinstance(value, staticmethod | classmethod | type(tool_methods))
    }
    return [getattr(environment, name) for name in names]


def accepted(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row that a function takes as keyword arguments."""
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return row
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in row.items() if name in named}


def required(function: Callable[..., Any]) -> list[str]:
    """The columns that a function cannot do without."""
    return [
        parameter.name
        for parameter in _parameters(function) or ()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None where a function tells nothing about itself, as some written in C do."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


def library(name: str, extra: str) -> ModuleType:
    """A package that an adapter is for.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported ({error}). Install it with: pip install 'covey[{extra}]'"
        ) from error
