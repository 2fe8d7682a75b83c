"""Errors of reward functions, and decorators that declare properties of a function."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Extract = Callable[[Any], Any] | str
"""The answer of a completion: a function of the completion, or the name of a column given to `log_extra`."""

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "covey_per_completion"


class RewardError(ValueError):
    """Error that stops the run: a reward function failed on all samples, or cannot be called."""


class MissingArgument(RewardError):
    """A reward function asks for an argument that no batch has."""


class RewardWarning(UserWarning):
    """Warning that some samples could not be scored; they get no reward and are counted in the metrics."""


def per_completion(function: F) -> F:
    """Mark a reward function that scores each completion independently, so that scoring can overlap with sampling.

    It is called with one or more completions that have just ended: an async function concurrently, an ordinary one on a
    thread of its own. Useful for functions that wait or take long. Marking a class marks its objects.

    Args:
        function: it must give a completion the same reward, whichever others are in the call. One that takes
            `trainer_state` is still called after sampling.

    Raises:
        RewardError: the function cannot be marked, such as a method of an object.

    Example:
        >>> @per_completion
        ... def short(completions, **kwargs):
        ...     return [-float(len(text)) for text in completions]
        >>> is_per_completion(functools.partial(short, limit=3)), is_per_completion(len)
        (True, False)
    """
    try:
        setattr(function, _MARK, True)
    except (AttributeError, TypeError) as error:
        raise RewardError(
            f"{function!r} cannot be marked per_completion ({error}); mark the function where it is defined."
        ) from error
    return function


def is_per_completion(function: Callable) -> bool:
    return declared(function, _MARK) is True  # stubs answer for every attribute


def declared(function: Callable, name: str) -> Any:
    """An attribute of a function, or of the function that a `partial` wraps; None without it."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, None)


def with_settings(function: Callable[..., Any], name: str, *settings: Any) -> Callable[..., Any]:
    """A reward `function` with its first arguments, under a name for metrics; unlike a closure it can be pickled."""
    reward = functools.partial(function, *settings)
    reward.__name__ = name  # type: ignore[attr-defined]
    return reward


def answers(extract: Extract) -> Callable[[F], F]:
    """Declare a completion's answer, for majority votes (`maj_at` of `covey.EvalSuite`).

    Args:
        extract: a function from a completion to its answer (None for no answer), or the name of a column that the
            reward function passes to `log_extra`.

    Example:
        >>> @answers(lambda completion: completion.split()[-1])
        ... def right(completions, answer, **kwargs):
        ...     return [float(text.endswith(one)) for text, one in zip(completions, answer)]
        >>> extract_of(functools.partial(right, strict=True))("it is 4")
        '4'
    """

    def mark(function: F) -> F:
        function.extract = extract  # type: ignore[attr-defined]
        return function

    return mark


def extract_of(function: Callable) -> Extract | None:
    return declared(function, "extract")
