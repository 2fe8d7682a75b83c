"""What users say about their reward functions by a decorator."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from covey.rewards.errors import RewardError

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
