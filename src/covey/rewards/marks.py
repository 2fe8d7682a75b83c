"""Search of reward functions' code for special tokens that they look for, so that completions can show them."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from covey.runtime.user_code import unwrap_partial, warn

DEPTH = 3  # levels of helper functions in the same module that are read
SHORTEST = 3  # fewest characters of a token to look for; shorter texts occur in any code


def named_tokens(functions: Sequence[Any], tokenizer: Any) -> set[str]:
    """Texts of the tokenizer's special tokens that occur in the functions, plain or escaped in a pattern."""
    texts = _texts_of(functions)
    special = {str(one) for one in getattr(tokenizer, "added_tokens_decoder", {}).values() if one.special}
    long = {token for token in special if len(token) >= SHORTEST}
    return {token for token in long if any(token in text or re.escape(token) in text for text in texts)}


def warn_of_hidden_tokens(functions: Sequence[Any], tokenizer: Any) -> None:
    """Warn of patterns with a token that completions never show, such as the end of the sequence."""
    texts = _texts_of(functions)
    ends = {getattr(tokenizer, name, None) for name in ("eos_token", "pad_token", "bos_token")}
    escaped = {token for token in ends if token is not None and re.escape(token) != token}
    for token in sorted(one for one in escaped if any(re.escape(one) in text for text in texts)):
        warn(
            f"a reward function looks for {token!r}, a special token that begins, ends or pads sequences: completions"
            " are given without it, so it never occurs. Look at `completion_ids` instead, which every reward function"
            " can ask for.",
        )


def _texts_of(functions: Sequence[Any]) -> set[str]:
    own = [one for one in functions if callable(one) and not isinstance(one, nn.Module)]
    return {text for function in own for text in texts_in(function)}


def texts_in(function: Callable[..., Any], depth: int = DEPTH) -> set[str]:
    """Strings that a callable can compare with, in its code, its attributes, its globals, and helpers in its module."""
    found: set[str] = set()
    for part in _parts(function):
        found.update(_texts(part))
        if not inspect.isfunction(part):
            continue
        code = part.__code__
        found.update(_constants(code))
        for name in _names(code):
            value = part.__globals__.get(name)
            if callable(value) and getattr(value, "__module__", None) == getattr(part, "__module__", ""):
                found.update(texts_in(value, depth - 1) if depth else ())
            else:
                found.update(_texts(value))
    return found


def _parts(function: Callable[..., Any]) -> Iterator[Any]:
    """The function with its defaults and closure; for an object its attributes and `__call__`."""
    while unwrap_partial(function) is not function:
        yield [*function.args, *function.keywords.values()]  # type: ignore[attr-defined]
        function = function.func  # type: ignore[attr-defined]
    inner: Any = function
    if not inspect.isroutine(inner):
        yield list(getattr(inner, "__dict__", {}).values())
        inner = _method(type(inner), "__call__")
    inner = getattr(inner, "__func__", inner) if inspect.ismethod(inner) else inner
    while inspect.isfunction(inner):
        yield inner
        yield [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
        for cell in inner.__closure__ or ():
            with suppress(ValueError):  # it is not filled yet
                yield cell.cell_contents
        inner = getattr(inner, "__wrapped__", None)


def _method(kind: type, name: str) -> Any:
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)


def _texts(value: Any, depth: int = DEPTH) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        yield value.pattern
    elif isinstance(value, list | tuple | set | frozenset | dict) and depth:
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(item, depth - 1)


def _constants(code: Any) -> Iterator[str]:
    for index, value in enumerate(code.co_consts):
        if hasattr(value, "co_consts"):
            yield from _constants(value)
        elif index or not isinstance(value, str):  # the first one may be a docstring
            yield from _texts(value)


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if hasattr(value, "co_names"):
            yield from _names(value)
