"""Python callables as reward functions: their arguments and their results."""

import functools
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.core.records import StepRewards
from covey.rewards.batch import Log, RewardBatch
from covey.rewards.decorators import is_per_completion
from covey.rewards.errors import MissingArgument, RewardError
from covey.rewards.steps import STEPS, as_steps
from covey.runtime.user_code import PlainCopies, format_value, is_async, unwrap_partial

Value = float | None | StepRewards
Values = Sequence[Value]
"""One value per sample: a number, None where the function abstains, NaN where it failed, or rewards of its steps."""


class Unusable(float):
    """NaN in place of a returned value that is no reward.

    Attributes:
        why: message with the returned and the expected value.
    """

    why: str

    def __new__(cls, why: str) -> "Unusable":
        made = super().__new__(cls, math.nan)
        made.why = why
        return made


def function_name(function: Callable) -> str:
    """Name of a callable in metrics: its `__name__`, that of the function in a `partial`, or its class's.

    Example:
        >>> function_name(functools.partial(max, 1))
        'max'
    """
    inner = unwrap_partial(function)
    name = getattr(function, "__name__", None) or getattr(inner, "__name__", None) or type(inner).__name__
    return name.strip("<>")  # "<lambda>" would be an odd metric name


class FunctionReward:
    """A callable, sync or async, with its signature read once.

    A function without `**kwargs` receives only the arguments it names. Keywords bound by `functools.partial` stay so.

    Attributes:
        per_completion: it may be called for every completion as soon as that has ended.
        turn: lock around an ordinary function, which need not be thread-safe though several batches may be scored at a
            time.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.name = name
        self.is_async = is_async(function)
        self.turn = threading.Lock()
        self._takes_all, self._names, self._required = _read_signature(function, name)
        self.per_completion = is_per_completion(function) and "trainer_state" not in self._names
        self._bound = function.keywords if isinstance(function, functools.partial) else {}

    def __call__(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        """Score a batch with a sync function."""
        return as_values(self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    async def call_async(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        """Score a batch with an async function."""
        return as_values(await self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    def arguments(self, batch: RewardBatch, trainer_state: Any, log: Log) -> dict[str, Any]:
        """Copies of the arguments that the function takes, so that it cannot change them for others.

        Raises:
            MissingArgument: it asks for something that neither the trainer nor the dataset has.
        """
        available: dict[str, Any] = dict(batch.arguments)
        available |= {"trainer_state": trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        self.require(available)
        copies, arguments = PlainCopies(), {}
        for name, value in available.items():
            if name not in self._bound and (self._takes_all or name in self._names):
                arguments[name] = copies.copy(value)
        return arguments

    def require(self, available: Collection[str]) -> None:
        """Raise for an argument without a default that is not available.

        Raises:
            MissingArgument: there is one.
        """
        if missing := self._required.difference(available):
            raise MissingArgument(
                f"reward function {self.name!r} asks for {', '.join(map(repr, sorted(missing)))}, which is neither"
                f" given by the trainer nor a dataset column. Available: {', '.join(sorted(available))}. Rename the"
                " column, or give the argument a default."
            )


def _read_signature(function: Callable, name: str) -> tuple[bool, frozenset[str], frozenset[str]]:
    """True if it takes any keyword; the keywords it names; those of them without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some C functions have no signature
        return True, frozenset(), frozenset()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise RewardError(
            f"reward function {name!r} takes {positional[0]!r} by position only, but reward functions are called with "
            "keyword arguments: prompts, completions, completion_ids and every dataset column."
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = frozenset(p.name for p in named if p.default is p.empty)
    return takes_all, frozenset(p.name for p in named), required


def as_values(returned: Any, size: int) -> Values:
    """Validate the result of a reward function for `size` samples.

    Accepted are lists and tuples of numbers, booleans, numpy or torch scalars and None, and one-dimensional arrays and
    tensors; instead of a number, a list of (end, reward) pairs. Any other element, or an infinite one, becomes
    `Unusable`.

    Raises:
        RewardError: another type or length, which cannot be assigned to samples.

    Example:
        >>> as_values((1, None, "two"), 3)
        [1.0, None, nan]
    """
    expected = f"expected a list of {size} numbers (or None), one per completion"
    if isinstance(returned, Tensor):
        returned = returned.detach().cpu()
    if isinstance(returned, list | tuple):
        items = list(returned)
    elif hasattr(returned, "tolist") and getattr(returned, "ndim", None) == 1:  # a tensor, an array, a pandas series
        items = returned.tolist()
    else:
        raise RewardError(f"it returned {format_value(returned)}; {expected}.{_hint(returned)}")
    if len(items) != size:
        raise RewardError(f"it returned {len(items)} rewards for {size} completions; {expected}.")
    values: list[Value] = []
    for item in items:
        value = as_steps(item, _number) if isinstance(item, list | tuple) else _number(item)
        if isinstance(value, _NotANumber) or (value is None and item is not None):
            value = _unusable(item, expected)
        values.append(value)
    return values


def _unusable(item: Any, expected: str) -> Unusable:
    rewards = [item]
    if isinstance(item, list | tuple):
        rewards = [pair[1] for pair in item if isinstance(pair, list | tuple) and len(pair) == 2]
    hint = ""
    if any(isinstance(one, numbers.Real) and isinstance(_number(one), _NotANumber) for one in rewards):
        hint = " Give finite numbers of ordinary size, None where there is no reward."
    elif isinstance(item, list | tuple):
        hint = " An end is the index of a token, CharEnd(n) or TurnEnd(k), a reward a number or None."
    return Unusable(f"it returned {format_value(item)} for a completion; {expected}, {STEPS}.{hint}")


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
