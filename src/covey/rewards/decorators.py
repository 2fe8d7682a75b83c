"""What users say about their reward functions by a decorator."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from covey.rewards.errors import RewardError

Extract = Callable[[Any], Any] | str
"""What a completion's answer is: a function from the completion, or the name of a column given to `log_extra`."""

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "covey_per_completion"


def per_completion(function: F) -> F:
    """Say that a reward function judges every completion by itself, so that it may be called as soon as one is there.

    It is then called with what has just ended, one completion or several, while others are still sampled: an async
    function for all of them at the same time, an ordinary one on a thread of its own. Worth it for functions that wait
    for something or take long. A class is marked for its objects.

    Args:
        function: gives a completion the same reward whatever else it is called with, and does not look at
            `trainer_state` (one that names it is called after sampling, mark or no mark).

    Raises:
        RewardError: it takes no mark, as methods of objects do not.

    Example:
        >>> @per_completion
        ... def short(completions, **kwargs):
        ...     return [-float(len(text)) for text in completions]
        >>> judges_each(functools.partial(short, limit=3)), judges_each(len)
        (True, False)
    """
    try:
        setattr(function, _MARK, True)
    except (AttributeError, TypeError) as error:
        raise RewardError(
            f"{function!r} cannot be marked per_completion ({error}); mark the function where it is defined."
        ) from error
    return function


def judges_each(function: Callable) -> bool:
    """Whether `function` is marked `per_completion`."""
    while isinstance(function, functools.partial) and not getattr(function, _MARK, False):
        function = function.func
    return bool(getattr(function, _MARK, False))


def answers(extract: Extract) -> Callable[[F], F]:
    """Say what a completion's answer is, for whoever counts votes (`maj_at` of `covey.EvalSuite`).

    Args:
        extract: a function from a completion to its answer, None where it has none; or the name of a column that the
            reward function gives to `log_extra`.

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
    """What a reward function says about answers: its attribute `extract`, also of what a `partial` wraps."""
    while isinstance(function, functools.partial) and not hasattr(function, "extract"):
        function = function.func
    return getattr(function, "extract", None)
