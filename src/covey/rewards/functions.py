"""Python callables as reward functions: which arguments they take, and what they may return."""

import functools
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.core.credit import StepRewards
from covey.rewards.batch import Log, RewardBatch
from covey.rewards.decorators import judges_each
from covey.rewards.errors import MissingArgument, RewardError
from covey.rewards.steps import STEPS, as_steps, is_steps
from covey.runtime.user_code import PlainCopies, format_value, is_async, unwrap_partial

Value = float | None | StepRewards
Values = Sequence[Value]
"""One value per sample: a number, None where the function abstains, NaN where it failed, or rewards of its steps."""


class Unusable(float):
    """NaN in the place of what a function returned for a sample, which is no reward.

    Attributes:
        why: what was returned, what is expected.
    """

    why: str

    def __new__(cls, why: str) -> "Unusable":
        made = super().__new__(cls, math.nan)
        made.why = why
        return made


def function_name(function: Callable) -> str:
    """The name of a callable in metrics: its `__name__`, that of what a `partial` wraps, or its class's.

    Example:
        >>> function_name(functools.partial(max, 1))
        'max'
    """
    function = unwrap_partial(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return name.strip("<>")  # "<lambda>" would be an odd metric name


class FunctionReward:
    """A callable, sync or async, with its signature read once.

    A function without `**kwargs` receives only the arguments it names. Keywords bound by `functools.partial` stay so.

    Attributes:
        judges_each: it may be called for every completion as soon as that is there.
        turn: held while an ordinary function runs. Several generations may be scored at a time, on threads of their
            own, and a function need not be made for that.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.name = name
        self.is_async = is_async(function)
        self.turn = threading.Lock()
        self._takes_all, self._names, self._required = _read_signature(function, name)
        self.judges_each = judges_each(function) and "trainer_state" not in self._names

    def __call__(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        """Score a batch with a sync function."""
        return as_values(self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    async def call_async(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        """Score a batch with an async function."""
        return as_values(await self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    def arguments(self, batch: RewardBatch, trainer_state: Any, log: Log) -> dict[str, Any]:
        """What the function is called with: copies, so that it can disturb neither the next function nor training.

        Raises:
            MissingArgument: it asks for something that neither the trainer nor the dataset has.
        """
        available: dict[str, Any] = dict(batch.arguments)
        available |= {"trainer_state": trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        self.require(available)
        bound, copies = _bound_keywords(self.function), PlainCopies()
        return {
            name: copies.copy(value)
            for name, value in available.items()
            if name not in bound and (self._takes_all or name in self._names)
        }

    def require(self, available: Collection[str]) -> None:
        """Make sure that every argument without a default is among those that are given.

        Raises:
            MissingArgument: one is not.
        """
        missing = [name for name in self._required if name not in available]
        if missing:
            raise MissingArgument(
                f"reward function {self.name!r} asks for {', '.join(map(repr, missing))}, which is neither given by "
                f"the trainer nor a dataset column. Available: {', '.join(sorted(available))}. Rename the column, or "
                "give the argument a default."
            )


def _read_signature(function: Callable, name: str) -> tuple[bool, frozenset[str], list[str]]:
    """Whether it takes any keyword, the keywords it names, and those of them without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some C functions tell nothing about themselves
        return True, frozenset(), []
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise RewardError(
            f"reward function {name!r} takes {positional[0]!r} by position only, but reward functions are called with "
            "keyword arguments: prompts, completions, completion_ids and every dataset column."
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return takes_all, frozenset(p.name for p in named), [p.name for p in named if p.default is p.empty]


def _bound_keywords(function: Callable) -> set[str]:
    """Keywords given to `functools.partial` (which merges nested ones)."""
    return set(function.keywords) if isinstance(function, functools.partial) else set()


def as_values(returned: Any, size: int) -> Values:
    """What a reward function returned for `size` samples as a list of numbers and rewards of steps.

    Accepted are lists and tuples of numbers, booleans, numpy or torch scalars and None, and one-dimensional arrays and
    tensors; in the place of a number, a list of (end, reward) pairs. An element that is none of these, or infinite, is
    `Unusable`.

    Raises:
        RewardError: another type or length, so that nobody can say which sample has which reward.

    Example:
        >>> as_values((1, None, "two"), 3)
        [1.0, None, nan]
    """
    expected = f"expected a list of {size} numbers (or None), one per completion"
    items = _listed(returned)
    if items is None:
        raise RewardError(f"it returned {format_value(returned)}; {expected}.{_hint(returned)}")
    if len(items) != size:
        raise RewardError(f"it returned {len(items)} rewards for {size} completions; {expected}.")
    return [_value(item, expected) for item in items]


def _value(item: Any, expected: str) -> Value:
    """What was returned for one sample."""
    value = as_steps(item, _number) if is_steps(item) else _number(item)
    if not isinstance(value, _NotANumber) and (value is not None or item is None):
        return value
    rewards = [pair[1] for pair in item if is_steps(pair) and len(pair) == 2] if is_steps(item) else [item]
    endless = any(isinstance(one, numbers.Real) and isinstance(_number(one), _NotANumber) for one in rewards)
    hint = " Give finite numbers of ordinary size, None where there is no reward." if endless else ""
    if is_steps(item) and not endless:
        hint = " An end is the index of a token, CharEnd(n) or TurnEnd(k), a reward a number or None."
    return Unusable(f"it returned {format_value(item)} for a completion; {expected}, {STEPS}.{hint}")


def _listed(returned: Any) -> list | None:
    """The elements of a list, a tuple or a one-dimensional array, or None for anything else."""
    if isinstance(returned, Tensor):
        returned = returned.detach().cpu()
    if isinstance(returned, list | tuple):
        return list(returned)
    if hasattr(returned, "tolist") and getattr(returned, "ndim", None) == 1:  # a tensor, an array, a pandas series
        return returned.tolist()
    return None


class _NotANumber:
    """Marks an element that cannot be a reward."""


def _number(item: Any) -> "float | _NotANumber | None":
    if item is None:
        return None
    if not isinstance(item, numbers.Real) and hasattr(item, "item"):
        try:
            item = item.item()  # a numpy or torch scalar
        except (ValueError, RuntimeError):  # an array of several elements
            return _NotANumber()
    if not isinstance(item, numbers.Real):
        return _NotANumber()
    try:
        value = float(item)
    except OverflowError:
        return _NotANumber()
    if abs(value) > torch.finfo(torch.float32).max:
        return _NotANumber()
    return value


def _hint(returned: Any) -> str:
    if returned is None:
        return " Is there a `return`?"
    if inspect.isawaitable(returned):
        return " It is awaitable: declare the function with `async def`, or as an object with an async `__call__`."
    shape = getattr(returned, "shape", None)
    return f" Its shape is {tuple(shape)}; flatten it to ({shape[0]},)." if shape else ""
