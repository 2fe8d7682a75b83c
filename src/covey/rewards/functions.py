"""Python callables as reward functions: their arguments, their logs, and checks of the values that they return."""

import functools
import inspect
import math
import numbers
import operator
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, SupportsIndex

import torch

from covey.core.findings import CheckError, Finding
from covey.core.records import FinishReason, Rollout, StepRewards
from covey.core.special_tokens import opened_thinking
from covey.core.transcript import is_messages
from covey.rewards.contract import MissingArgument, RewardError, is_per_completion
from covey.rewards.steps import CharEnd, TurnEnd
from covey.rewards.text import describe_sample
from covey.runtime.child_process import Quota
from covey.runtime.deadlines import MAX_STILL_RUNNING, CallTimeout, LateCalls
from covey.runtime.isolation import FunctionWorker, WorkerFailed, WorkerLate, check_sendable
from covey.runtime.safe_text import printable
from covey.runtime.user_code import ATOMS, PlainCopies, format_value, is_async, parameters_of, unwrap_partial

RESERVED = frozenset(
    {"prompts", "completions", "completions_ids", "thinking_openings", "trainer_state", "log_extra", "log_metric"}
)
"""Arguments of every reward function, whose names dataset columns must not have."""

NOT_FORWARDED = frozenset({"prompt", "completion", "completion_ids"})  # columns that the arguments above replace
Row = dict[str, Any]  # of the dataset
STEPS = "or, for rewards of its steps, a list of (end, reward) pairs"  # alternative to a number, for messages
STEPS_ADVICE = " An end is the index of a token, CharEnd(n) or TurnEnd(k), a reward a number or None."
NUMBER_ADVICE = " Give finite numbers of ordinary size, None where there is no reward."


@dataclass(frozen=True)
class RewardContext:
    """Arguments of reward functions in addition to the samples."""

    trainer_state: Any  # the `TrainerState` of transformers, or None outside training
    log_extra: Callable[[str, list], None]  # (name of a column, one value per sample), for the completions table
    log_metric: Callable[[str, float], None]  # (name of a metric, number)


@dataclass(frozen=True)
class RewardBatch:
    """Samples to score. `rows[i]` is the dataset row of `rollouts[i]`, repeated for every completion of its group."""

    rows: list[Row]
    rollouts: list[Rollout]
    tokenizer: Any = None  # of the policy

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def scorable(self) -> list[int]:
        """Indices of the rollouts to score: those that are neither failed nor absent (placeholders)."""
        unscored = (FinishReason.ERROR, FinishReason.ABSENT)
        return [index for index, rollout in enumerate(self.rollouts) if rollout.finish not in unscored]

    def take(self, indices: list[int]) -> "RewardBatch":
        if len(indices) == len(self.rollouts):
            return self
        rollouts = [self.rollouts[index] for index in indices]
        return RewardBatch([self.rows[index] for index in indices], rollouts, self.tokenizer)

    def describe(self, index: int) -> str:
        return describe_sample(self.rollouts[index].asked(self.rows[index]), self.rollouts[index].completion)

    @cached_property
    def arguments(self) -> dict[str, list]:
        """Keyword arguments, a list each: samples, dataset columns, and extras of rollouts, which replace columns."""
        columns: dict[str, list] = {}
        for records in (self.rows, list(map(attrgetter("extras"), self.rollouts))):
            for name in dict.fromkeys(chain.from_iterable(records)):
                if name not in NOT_FORWARDED:
                    columns[name] = [record.get(name) for record in records]
        for taken in check_reserved(columns):  # of what rollouts give, too
            raise RewardError(taken.sentence)
        prompts = list(map(Rollout.asked, self.rollouts, self.rows))
        completions = list(map(Rollout.answered, self.rollouts))
        ids = list(map(attrgetter("completion_ids"), self.rollouts))
        given = {"prompts": prompts, "completions": completions, "completion_ids": ids, "completions_ids": ids}
        return columns | given | {"thinking_openings": list(map(self._opening, prompts, self.rollouts))}

    def _opening(self, prompt: Any, rollout: Rollout) -> str:
        """Text that opens thinking before the policy's last turn, which continues it; empty if there is none."""
        if self.tokenizer is None:
            return ""
        start = rollout.turn_ends[-2] + 1 if len(rollout.turn_ends) > 1 else 0
        if not start and is_messages(prompt) and prompt and prompt[-1].get("role") == "assistant":
            return ""  # the completion repeats the message that it continues
        turn = next((index for index in range(start, len(rollout.sampled)) if rollout.sampled[index]), start)
        return opened_thinking(self.tokenizer, rollout.prompt_ids + rollout.completion_ids[:turn])


def arguments_with(columns: Iterable[str]) -> set[str]:
    """Names of all arguments for a dataset with these columns."""
    return {*columns} - NOT_FORWARDED | RESERVED | {"completion_ids"}


def check_reserved(columns: Iterable[str]) -> Iterator[Finding]:
    if taken := sorted(RESERVED.intersection(columns)):
        evidence = f"column {taken[0]!r} has the name of an argument that every reward function receives"
        fix = "rename it, with `dataset.rename_column` for instance."
        yield Finding.error("column-reserved", f"{evidence} ({', '.join(sorted(RESERVED))});", fix)


def _loggable(value: Any) -> Any:
    """A value for a logged column: a copy of plain data, a number for numpy and torch scalars, else text."""
    if type(value) in (list, tuple):
        return [_loggable(one) for one in value]
    if type(value) is dict:
        return {str(name): _loggable(one) for name, one in value.items()}
    if type(value) in ATOMS:
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return str.__str__(str(value))


def check_logged_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise RewardError(f"{function}({name!r}, ...): a name is text of printable characters, on one line.")


@dataclass
class Log:
    """Log of one call of a reward function on `size` samples; it is used only if the call succeeds."""

    size: int
    extras: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: list) -> None:
        if isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__iter__"):
            raise RewardError(
                f"log_extra({column!r}, ...) was given a {type(values).__name__}: give one value a sample."
            )
        check_logged_name("log_extra", column)
        values = list(values)
        if len(values) != self.size:
            raise RewardError(f"log_extra({column!r}, ...) was given {len(values)} values for {self.size} samples.")
        self.extras[str(column)] = [_loggable(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        check_logged_name("log_metric", name)
        try:
            if isinstance(value, str | bytes):  # which float would read
                raise TypeError
            self.metrics.append((str(name), float(value)))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last: a tensor without values
            raise RewardError(f"log_metric({name!r}, ...) was given {format_value(value)}: give a number.") from error

    def replay(self, context: RewardContext, indices: list[int], size: int) -> None:
        """The log for a batch of `size` samples, where this log's samples have the given indices; others get None."""
        for column, values in self.extras.items():
            cells = dict(zip(indices, values, strict=True))
            context.log_extra(column, [cells.get(index) for index in range(size)])
        for name, value in self.metrics:
            context.log_metric(name, value)

    @classmethod
    def joined(cls, logs: "list[Log]") -> "Log":
        """One log of several calls, with None for samples of calls that did not log a column."""
        columns = dict.fromkeys(column for log in logs for column in log.extras)
        extras = {key: [value for log in logs for value in log.extras.get(key, [None] * log.size)] for key in columns}
        return cls(sum(log.size for log in logs), extras, [metric for log in logs for metric in log.metrics])


Value = float | None | StepRewards
Values = Sequence[Value]
"""One value per sample: a number, None for an abstention, NaN for a failure, or rewards of the sample's steps."""


class FailedReward(float):
    """NaN in place of a reward that a function failed to give; `error` is None if the function itself returned NaN."""

    error: BaseException | None
    text: str

    def __new__(cls, error: BaseException | None, text: str) -> "FailedReward":
        made = super().__new__(cls, math.nan)
        made.error, made.text = error, printable(text.rstrip("."))
        return made

    def __getnewargs__(self) -> tuple[BaseException | None, str]:  # type: ignore[override]
        return self.error, self.text

    @property
    def is_late(self) -> bool:
        return isinstance(self.error, CallTimeout)


def function_name(function: Callable) -> str:
    """Name of a callable in metrics: its `__name__`, the name of the function in a `partial`, or that of its class."""
    inner = unwrap_partial(function)
    names = (getattr(one, "__name__", None) for one in (function, inner))
    name = next((name for name in names if name and isinstance(name, str)), type(inner).__name__)
    return name.strip("<>")  # "<lambda>" would be an odd metric name


class FunctionReward:
    """A callable, sync or async, with its signature read once.

    A function without `**kwargs` gets only the arguments that it names. Keywords bound by `functools.partial` are kept.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function, self.name = function, name
        self.is_async = is_async(function)
        self.turn = threading.Lock()  # several batches may be scored at a time, and it need not be thread-safe
        self.late = LateCalls(f"reward function {name!r}", MAX_STILL_RUNNING if self.is_async else 1)
        self._takes_all, self._names, self._required = _read_signature(function, name)
        self._receiver = _receiver(function)
        self.per_completion = is_per_completion(function) and "trainer_state" not in self._names
        self._bound = function.keywords if isinstance(function, functools.partial) else {}

    @property
    def names(self) -> frozenset[str] | None:
        """Names of the arguments that the function takes; None: any."""
        return None if self._takes_all else self._names - self._bound.keys()

    def unfilled(self, columns: Iterable[str]) -> frozenset[str]:
        """Names of arguments that keep their defaults with these columns."""
        return self._names - self._required - self._bound.keys() - arguments_with(columns)

    def __call__(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        return as_values(self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    async def call_async(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        return as_values(await self.function(**self.arguments(batch, trainer_state, log)), len(batch))

    def arguments(self, batch: RewardBatch, trainer_state: Any, log: Log) -> dict[str, Any]:
        """Copies of the arguments that the function takes, so that it cannot change them for others."""
        available: dict[str, Any] = dict(batch.arguments)
        available |= {"trainer_state": trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        for found in self._missing(available):  # what rollouts give is known only now
            raise MissingArgument(found.sentence)
        names = (available.keys() if self._takes_all else self._names) - self._bound.keys()
        copies = PlainCopies()
        return {name: copies.copy(value) for name, value in available.items() if name in names}

    def check_columns(self, columns: Iterable[str]) -> Iterator[Finding]:
        """Errors for required arguments that neither the trainer nor a dataset with these columns provides."""
        yield from self._missing(arguments_with(columns))

    def _missing(self, available: Collection[str]) -> Iterator[Finding]:
        if self._takes_all and self._receiver in available:
            yield Finding.error(
                "data-columns",
                f"the dataset has a column {self._receiver!r}, and reward function {self.name!r} is a method, or an"
                f" object with one, that calls its object so: it cannot get both.",
                f"Rename the column, as by `dataset.rename_column({self._receiver!r}, ...)`.",
            )
        if missing := self._required.difference(available):
            replaced = sorted(missing & NOT_FORWARDED)
            why = f" A column {replaced[0]!r} is not passed: `{replaced[0]}s` holds the run's own." if replaced else ""
            yield Finding.error(
                "data-columns",
                f"reward function {self.name!r} asks for {', '.join(map(repr, sorted(missing)))}, which is neither"
                f" given by the trainer nor a dataset column.{why} Available: {', '.join(sorted(available))}.",
                "Rename the column (`columns: {old: new}` in a run file), or give the argument a default.",
            )


def not_isolated(name: str, error: Exception) -> Finding:
    return Finding.error(
        "reward-isolation",
        f"reward function {name!r} cannot run in a process of its own: {error}.",
        "Import it from a .py file with `def` (or a class) at its top level; or leave it in the trainer's process,"
        " without @isolated and with reward_isolation='thread'.",
    )


def check_isolated(function: Callable[..., Any], name: str) -> Iterator[Finding]:
    """The error for a function that cannot run in a process of its own."""
    try:
        check_sendable(function)
    except ValueError as error:
        yield not_isolated(name, error)


class IsolatedReward(FunctionReward):
    """A callable in a warm worker process; a coroutine is waited for there.

    A dead process is replaced at the next call. Arguments are copies; `trainer_state` has only its numbers and texts.
    Its creation raises CheckError if the function cannot be sent or loaded.
    """

    def __init__(self, function: Callable[..., Any], name: str, limits: Quota):
        super().__init__(function, name)
        self.is_async = False
        try:
            if "environments" in self._names:
                raise ValueError("it asks for `environments`, which exist only in the trainer's process")
            self.worker = FunctionWorker(function, limits, decode=_reward_of_json)
            self.worker.start()
        except (ValueError, RuntimeError) as error:
            raise CheckError(not_isolated(name, error)) from error
        self._until = 0.0

    def restart(self, seconds: float) -> None:
        """Wait until a replaced process has started, so that this does not count as a delay of the next sample."""
        with suppress(WorkerFailed, RuntimeError):  # which the next call will meet, too
            self.worker.start(seconds)

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """As `deadlines.call_with_deadline`, for a function that calls this object."""
        if seconds <= 0:
            raise CallTimeout
        self._until = time.monotonic() + seconds
        return function()

    def __call__(self, batch: RewardBatch, trainer_state: Any, log: Log) -> Values:
        arguments = self.arguments(batch, trainer_state, log)
        arguments.pop("environments", None)
        recorded = [name for name in ("log_extra", "log_metric") if arguments.pop(name, None)]
        if arguments.get("trainer_state") is not None:
            fields = vars(trainer_state).items()
            plain = {name: value for name, value in fields if isinstance(value, int | float | str | None)}
            arguments["trainer_state"] = SimpleNamespace(**plain)
        try:
            reply = self.worker.call(arguments, self._until - time.monotonic(), recorded)
        except WorkerLate:
            raise CallTimeout from None
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise RewardError(f"its arguments cannot be sent to its process: {error}") from error
        if "raised" in reply:
            kind, message, trace = reply["raised"]
            raised = type(kind, (Exception,), {})(message)  # shown as the one of that process
            raised.add_note(trace)
            raise raised
        for name, args, kwargs in reply["calls"]:
            getattr(log, name)(*args, **kwargs)
        return as_values(reply["result"], len(batch))


def _reward_of_json(fields: dict[str, Any]) -> Any:
    """An object in a worker's answer: a `CharEnd`, `TurnEnd` or another known class, else the dictionary itself."""
    match fields:
        case {"covey.CharEnd": [int(end)]}:
            return CharEnd(end)
        case {"covey.TurnEnd": [int(turn)]}:
            return TurnEnd(turn)
        case {"covey.FailedReward": [_, str(text)]}:
            return FailedReward(RewardError(text), text)
    return fields


def _receiver(function: Callable) -> str | None:
    """Name of the first parameter (`self`) of a method, or of an object's `__call__`; None for a plain function."""
    inner = unwrap_partial(function)
    method = getattr(inner, "__func__", None) if inspect.ismethod(inner) else None
    if method is None and not inspect.isroutine(inner):
        method = type(inner).__call__
    first = next(iter(parameters_of(method) or ()), None) if inspect.isfunction(method) else None
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else None


def _read_signature(function: Callable, name: str) -> tuple[bool, frozenset[str], frozenset[str]]:
    """True if it takes any keyword; the keywords that it names; and those of them without a default."""
    parameters = parameters_of(function)
    if parameters is None:
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
    tensors; instead of a number, a list of (end, reward) pairs. Any other element, or an infinite one, becomes a
    `FailedReward`.

    Example:
        >>> as_values((1, None, "two"), 3)
        [1.0, None, nan]
    """
    expected = f"expected a list of {size} numbers (or None), one per completion"
    if isinstance(returned, list | tuple):
        items = list(returned)
    elif hasattr(returned, "tolist") and getattr(returned, "ndim", None) == 1:  # a tensor, an array, a pandas series
        items = returned.tolist()
    else:
        raise RewardError(f"it returned {format_value(returned)}; {expected}.{_hint(returned)}")
    if len(items) != size:
        raise RewardError(f"it returned {len(items)} rewards for {size} completions; {expected}.")
    return [_as_value(item, expected) for item in items]


def _as_value(item: Any, expected: str) -> Value:
    if isinstance(item, FailedReward):  # of a function that says why
        return item
    are_steps = isinstance(item, list | tuple)
    try:
        return _as_steps(item) if are_steps else _as_number(item)
    except _NotAReward as error:
        advice = str(error)
        if are_steps and not advice:
            advice = STEPS_ADVICE
        text = f"it returned {format_value(item)} for a completion; {expected}, {STEPS}.{advice}"
        return FailedReward(RewardError(text), text)


class _NotAReward(ValueError):
    """A value that is not a reward; the message is advice, or empty if the type alone is wrong."""


def _as_number(item: Any) -> float | None:
    """A float, or None where the function abstains; _NotAReward for anything that cannot be a reward."""
    if item is None:
        return None
    with suppress(ValueError, RuntimeError, OverflowError):  # several elements, or an integer that is too large
        scalar = not isinstance(item, numbers.Real) and hasattr(item, "item")  # of numpy or torch
        value = item.item() if scalar else item
        number = float(value) if isinstance(value, numbers.Real) else math.inf
        if math.isnan(number) or abs(number) <= torch.finfo(torch.float32).max:
            return number
    raise _NotAReward(NUMBER_ADVICE if isinstance(item, numbers.Real) else "")


def _as_steps(pairs: "list | tuple") -> StepRewards:
    """Validate `(end, reward)` pairs; _NotAReward for anything else."""
    steps: StepRewards = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _NotAReward
        reward, end = _as_number(pair[1]), _as_end(pair[0])
        steps.append((end, math.nan if reward is None else reward))
    return steps


def _as_end(end: Any) -> int:
    if isinstance(end, CharEnd | TurnEnd):
        return end
    if isinstance(end, SupportsIndex) and not isinstance(end, bool):
        with suppress(TypeError, ValueError):
            return operator.index(end)  # numpy's and torch's integers too
    raise _NotAReward


def _hint(returned: Any) -> str:
    if returned is None:
        return " Is there a `return`?"
    if inspect.isawaitable(returned):
        return " It is awaitable: declare the function with `async def`, or as an object with an async `__call__`."
    shape = getattr(returned, "shape", None)
    return f" Its shape is {tuple(shape)}; flatten it to ({shape[0]},)." if shape else ""
