"""Toolbox: answers each tool call of a turn, under a deadline, with a result or an error; no tool ends a run."""

import asyncio
import copy
import difflib
import inspect
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any

from covey.core.records import Message, Rollout
from covey.core.stats import Mean, Stat
from covey.rollout.tools.calls import AssistantTurn, MalformedCall, ToolCall
from covey.rollout.tools.tool import Tool, WrongArgument
from covey.runtime.calling_thread import call_here, is_threaded
from covey.runtime.deadlines import CallTimeout, StillRunning
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import (
    PlainCopies,
    UserCodeError,
    call_and_wait,
    format_error,
    is_async,
    unsaveable_part,
    warn,
)

Content = str | list[dict[str, Any]]
"""A text, or parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`."""


class Failure(StrEnum):
    """Reason why a call has no result."""

    MALFORMED = "malformed"  # it could not be read
    UNKNOWN_TOOL = "unknown_tool"  # there is no such tool
    WRONG_ARGUMENT = "wrong_argument"  # an argument is missing, unknown or of another type
    EXCEPTION = "exception"  # the tool raised an exception, or its result could not be rendered or shown
    TIMEOUT = "timeout"  # the tool took longer than `timeout`
    TOO_MANY = "too_many"  # the turn had more calls than are executed at once


@dataclass(slots=True)
class ToolResult:
    """The answer to one call."""

    name: str
    call_id: str
    content: Content
    failure: Failure | None = None
    returned: list[Any] | None = None  # by the tool, where that is a list of plain values; `content` is its text

    def message(self) -> Message:
        return {"role": "tool", "name": self.name, "tool_call_id": self.call_id, "content": self.content}

    def without_images(self) -> "ToolResult":
        """The result for a model that reads only text: an image becomes an error."""
        if isinstance(self.content, str) or all(part["type"] == "text" for part in self.content):
            return self
        content = error_text(f"{self.name} returned an image, and you can read text alone")
        return replace(self, content=content, failure=Failure.EXCEPTION)


def count_outcomes(results: Iterable[ToolResult]) -> Counter[str]:
    """Number of calls by outcome: "ok" or a `Failure`. A call that could not be read counts as failed."""
    return Counter("ok" if result.failure is None else result.failure.value for result in results)


def call_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """`tools/call_frequency` (calls per rollout), `tools/failure_frequency`, and the share of each kind of failure."""
    outcomes: Counter[str] = sum((Counter(rollout.calls) for rollout in rollouts), Counter())
    calls = outcomes.total()
    return {
        "tools/call_frequency": Mean(calls, len(rollouts)),
        "tools/failure_frequency": Mean(calls - outcomes["ok"], calls),
        **{f"tools/failures/{kind.value}": Mean(outcomes[kind.value], calls) for kind in Failure},
    }


class ToolWarning(UserWarning):
    """Warning of a problem with a tool; the run continues."""


@dataclass
class Outcomes:
    """Outcomes of one tool's executed calls; calls that were never executed do not count."""

    worked: bool = False  # at least one call succeeded
    failed: int = 0
    first: str = ""  # failure
    warned: bool = False

    def note(self, failure: str) -> None:
        self.first = self.first or failure
        self.failed += 1


class Toolbox:
    """Tools by name, called under a deadline.

    Ordinary functions are called one after another by the thread that waits for the rollouts. Functions marked with
    `covey.threaded`, and all functions if no thread waits, are each called on a thread of their own.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        timeout: float = 60.0,  # seconds that one call may take (`tool_timeout`)
        max_result_chars: int = 20_000,  # that the policy is shown
        max_parallel_calls: int = 32,  # of one turn; the rest are answered with an error
        loop: LoopThread | None = None,  # for async tools; None: one of its own
    ):
        limits = {"timeout": timeout, "max_result_chars": max_result_chars, "max_parallel_calls": max_parallel_calls}
        for name, limit in limits.items():
            if not limit > 0:
                raise ValueError(f"{name}={limit!r} of the tools must be greater than 0.")
        self.timeout, self.max_result_chars, self.max_parallel_calls = timeout, max_result_chars, max_parallel_calls
        self.tools: dict[str, Tool] = {}
        for tool in map(Tool.of, tools):
            if tool.name in self.tools:
                raise ValueError(f"two tools are called {tool.name!r}; give one of them another name.")
            self.tools[tool.name] = tool
        self._loop = loop or LoopThread("covey-async-tools")
        self._outcomes = {name: Outcomes() for name in self.tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(tool.schema) for tool in self.tools.values()]

    async def answer(self, turn: AssistantTurn, first_id: int = 0) -> list[ToolResult]:
        """Execute the calls of a turn concurrently; returns an answer per call in order, malformed calls last.

        `first_id` is the number of the first call within its rollout, used for ids that the policy did not write.
        """
        calls: list[ToolCall | MalformedCall] = [*turn.calls, *turn.malformed]
        executed = calls[: self.max_parallel_calls]
        results = await asyncio.gather(*(self._execute(call, first_id + i) for i, call in enumerate(executed)))
        left_out = len(calls) - len(executed)
        if left_out:
            text = f"only {len(executed)} calls of a turn are executed; {left_out} more were left out"
            results.append(_failed("tool", _call_id(first_id + len(executed)), Failure.TOO_MANY, text))
        return results

    async def _execute(self, call: ToolCall | MalformedCall, number: int) -> ToolResult:
        if isinstance(call, MalformedCall):
            text = f"the call could not be read: {_short(call.reason)}"
            return _failed("tool", _call_id(number), Failure.MALFORMED, text)
        name, call_id = _short(call.name, 100), call.call_id or _call_id(number)
        tool = self.tools.get(call.name)
        if tool is None:
            close = difflib.get_close_matches(name, self.tools, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            text = f"there is no tool {name!r}{hint} The tools are: {', '.join(self.tools) or 'none'}"
            return _failed(name, call_id, Failure.UNKNOWN_TOOL, text)
        try:
            arguments = tool.arguments(copy.deepcopy(call.arguments))
        except WrongArgument as wrong:
            return _failed(name, call_id, Failure.WRONG_ARGUMENT, _short(str(wrong)))
        outcomes = self._outcomes[tool.name]
        try:
            made = await self._call(tool, arguments)
            outcomes.worked = True
            return ToolResult(name, call_id, made.content, returned=made.returned)
        except StillRunning as refused:
            failure, text = Failure.TIMEOUT, f"{name}: {refused}"
        except CallTimeout:
            failure, text = Failure.TIMEOUT, f"{name} took longer than {self.timeout:g} s and was given up"
            outcomes.note(text)
        except UserCodeError as raised:
            failure, text = Failure.EXCEPTION, _short(raised.message)
            outcomes.note(raised.release())
        except RuntimeError as error:  # no thread could be started
            failure, text = Failure.EXCEPTION, format_error(error)
        return _failed(name, call_id, failure, text)

    def warn_of_failures(self) -> None:
        """Warn once about each tool whose calls have all failed so far: the policy is trained on its errors."""
        for name, outcomes in self._outcomes.items():
            if outcomes.failed and not outcomes.worked and not outcomes.warned:
                outcomes.warned = True
                warn(
                    f"all {outcomes.failed} calls of the tool {name!r} have failed. The first one: {outcomes.first}."
                    " The policy reads such errors and is trained on them: make the tool work, or let it return a text"
                    " that says what the policy did wrong.",
                    ToolWarning,
                )

    def rendered(self, result: Any) -> "Rendered":
        return rendered(result, self.max_result_chars)

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> "Rendered":
        """The rendered result. Rendering runs code of the result, so it is under the same deadline as the call."""
        if is_async(tool.function):

            async def run_async() -> Rendered:
                result = await tool.function(**arguments)
                return self.rendered(await result if inspect.isawaitable(result) else result)

            return await self._loop.call(run_async, self.timeout, tool.late)

        called, own_thread = partial(call_and_wait, tool.function, **arguments), is_threaded(tool.function)
        return await call_here(lambda: self.rendered(called()), self.timeout, tool.late, threaded=own_thread)


def _failed(name: str, call_id: str, failure: Failure, text: str) -> ToolResult:
    return ToolResult(name, call_id, error_text(text), failure)


def error_text(text: str) -> str:
    """Text that the policy reads instead of a result: a dictionary, which scripts written for TRL search for."""
    return str({"error": text})


def _call_id(number: int) -> str:
    return f"call{number:05d}"


def _short(text: str, limit: int = 500) -> str:
    return text_of(text if len(text) <= limit else f"{text[:limit]}...", limit + 3)


# --- results as the content of a message -----------------------------------------------------------------------------
# A result may be of any size, endlessly nested, or broken: rendering stops once there is more text than will be shown.
# It runs code of the result (`__str__`, `__repr__`), so call it under the tool's deadline.

BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    dict: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    deque: ("deque([", "])"),
}
MAX_DEPTH = 50  # containers are shown down to this depth
MAX_PARTS = 1000  # most members of a list that are searched for images, and shown if there are any


@dataclass(frozen=True, slots=True)
class Rendered:
    """A result as the policy reads it, and the original if it is a list of plain values that was not shortened."""

    content: Content
    returned: list[Any] | None = None


def rendered(result: Any, limit: int) -> Rendered:
    """A result of any type as text of at most `limit` characters and a note of the rest, or as parts with images."""
    if (parts := parts_of(result, limit)) is not None:
        return Rendered(parts)
    text, whole = shown_text(result, limit)
    return Rendered(text, PlainCopies().copy(result) if whole and type(result) is list and _is_plain(result) else None)


def _is_plain(result: list[Any]) -> bool:
    try:
        return unsaveable_part(result, "") is None
    except RecursionError:  # it contains itself
        return False


def parts_of(result: Any, limit: int) -> list[dict[str, Any]] | None:
    if isinstance(result, list | tuple):
        first = list(islice(result, MAX_PARTS))
        return [_part(item, limit) for item in first] if any(_is_image(one) or _is_part(one) for one in first) else None
    return [_part(result, limit)] if _is_image(result) else None


def text_of(result: Any, limit: int) -> str:
    """A result as text that every tokenizer can encode: a string unchanged, `str` of anything else."""
    return shown_text(result, limit)[0]


def shown_text(result: Any, limit: int) -> tuple[str, bool]:
    """The text of a result, and True if nothing was left out."""
    known = True
    if isinstance(result, str):
        text = str.__str__(result)
    elif isinstance(result, bytes | bytearray):
        text = bytes(result[: 4 * limit + 4]).decode("utf-8", "replace")
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the tool returned a generator instead of a result; let it return a list or a string")
    else:
        text, known = _take(_shown(result), 4 * limit)
    left_out = len(text) - limit
    if left_out > 0:
        text = f"{text[:limit]}\n[{f'{left_out} ' if known else ''}more characters left out]"
    return text.encode("utf-8", "replace").decode(), left_out <= 0


def _take(pieces: Iterator[str], limit: int) -> tuple[str, bool]:
    """The first pieces, up to at least `limit` characters, and True if there are no more."""
    taken: list[str] = []
    length = 0
    for piece in pieces:
        taken.append(piece)
        length += len(piece)
        if length > limit:
            return "".join(taken), False
    return "".join(taken), True


def _shown(value: Any, above: tuple[int, ...] = ()) -> Iterator[str]:
    kind = type(value)
    if kind not in BRACKETS or (not value and kind is not tuple):
        yield str.__str__(repr(value) if above else str(value))
        return
    if id(value) in above or len(above) == MAX_DEPTH:
        yield "..."
        return
    above = (*above, id(value))
    left, right = BRACKETS[kind]
    yield left
    for number, item in enumerate(value):
        yield ", " if number else ""
        yield from _shown(item, above)
        if kind is dict:
            yield ": "
            yield from _shown(value[item], above)
    yield ",)" if kind is tuple and len(value) == 1 else right


def _part(item: Any, limit: int) -> dict[str, Any]:
    if _is_image(item):
        return {"type": "image", "image": item}
    if _is_part(item):
        return {"type": "text", "text": text_of(item["text"], limit)} if item["type"] == "text" else dict(item)
    return {"type": "text", "text": text_of(item, limit)}


def _is_part(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in ("text", "image") and item["type"] in item


def _is_image(item: Any) -> bool:
    """True for a PIL image; False if PIL was never imported."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(item, pil.Image)
