"""Seats of a game that are not trained: models, servers and functions that play with the policy or against it."""

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from aiohttp import ClientError, ClientSession, ClientTimeout

from covey.core.engine import SampleRequest
from covey.core.records import Completion, FinishReason, Message
from covey.runtime.calling_thread import is_threaded
from covey.runtime.deadlines import LateCalls, run_in_thread
from covey.runtime.user_code import UserCodeError, is_async

FROZEN = "frozen"  # seat played by the policy as it is when the trainer is made
PAST = re.compile(r"policy:([1-9]\d*)")  # seat played by the policy as it was at least so many optimizer steps ago


class SeatEngine(Protocol):
    """An engine that plays a seat instead of the policy."""

    async def generate(self, request: SampleRequest) -> list[Completion]: ...


class PastOpponents(Protocol):
    """Engines of earlier versions of the policy."""

    def keep(self, step: int, copies: bool = True) -> None:
        """Record that the policy has taken `step` optimizer steps, and copy it if `copies` and a copy is due."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def chosen(self, key: tuple[int | str, ...]) -> tuple[SeatEngine, int]:
        """The engine that plays the game of this key, and the age of its policy in optimizer steps."""


@dataclass(frozen=True)
class Seat:
    """A model on a server that plays a seat; for programs, the server must have the API that the program uses.

    Args:
        url: address of the API, including `/v1`.
        model: name that the server knows; the seat's name by default.
        key: API key that is sent to the server.
    """

    url: str
    model: str | None = None
    key: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """The URL without a slash at its end."""
        return self.url.rstrip("/")


SeatFunction = Callable[[list[Message]], str | Awaitable[str]]  # the conversation so far -> the seat's turn
Seats = Mapping[str, Any]
"""Each a Seat, "frozen", "policy:n", a SeatFunction (a FunctionSeat once it is checked) or a SeatEngine."""


def past_steps(seat: Any) -> int | None:
    """The n of "policy:n"; None for other seats."""
    match = PAST.fullmatch(seat) if isinstance(seat, str) else None
    return int(match[1]) if match else None


@dataclass(eq=False)
class FunctionSeat:
    """A function as a seat. One that is not async is called on another thread, so that other games continue.

    Its calls are made one after another, in the order in which games come to them, unless it is marked `threaded`.
    """

    function: SeatFunction
    seconds: float  # that one call may take
    _turns: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self._name = getattr(self.function, "__name__", self.function)
        self._late = LateCalls(f"the function {self._name!r} of a seat")

    async def answer(self, messages: list[Message]) -> str:
        """The seat's turn; ValueError if the function returns something other than text."""
        if is_async(self.function):
            said: Any = self.function(messages)
        else:
            async with nullcontext() if is_threaded(self.function) else self._turn():
                said = await self._called(messages)
        text = await said if inspect.isawaitable(said) else said
        if not isinstance(text, str):
            raise ValueError(
                f"the function {self._name!r} of a seat returned a {type(text).__name__}; it must return text."
            )
        return text

    async def _called(self, messages: list[Message]) -> Any:
        try:
            return await run_in_thread(partial(self.function, messages), self.seconds, self._late)
        except UserCodeError as raised:
            if isinstance(raised.error, Exception) and not isinstance(raised.error, StopIteration):
                raise raised.error from None  # which the game may handle
            raise

    def _turn(self) -> asyncio.Lock:
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def checked_seats(seats: Seats | None, seconds: float | None = None) -> dict[str, Any]:
    """A checked copy of the seats; ValueError for one of another type.

    Functions may be seats where `seconds` are given, which a call of one may take.
    """
    checked = dict(seats or {})
    for name, seat in checked.items():
        known = isinstance(seat, Seat) or seat == FROZEN or past_steps(seat) is not None or hasattr(seat, "generate")
        known = known or hasattr(seat, "chosen")
        if seconds is not None and not known and callable(seat):
            checked[name] = FunctionSeat(seat, seconds)
        elif not known:
            raise ValueError(
                f'the seat {name!r} is {seat!r}; give Seat(url=...), "frozen", "policy:n" for the policy as it was n'
                f" optimizer steps ago{'' if seconds is None else ', a function of messages'}, or an engine."
            )
    return checked


def seat_named(seats: Seats, name: str) -> Any:
    """The seat of a name; ValueError, with the closest name, if there is none."""
    if name in seats:
        return seats[name]
    close = difflib.get_close_matches(name, seats, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    known = f"there are {', '.join(map(repr, seats))}" if seats else "the trainer was given none"
    raise ValueError(f"there is no seat {name!r}: {known}.{meant} Give the trainer seats={{{name!r}: ...}}.")


@dataclass(eq=False)
class TextSeat:
    """An opponent that answers in text: a server, or a function."""

    name: str
    seat: Seat | FunctionSeat
    max_tokens: int
    temperature: float

    def begin(self, prompt: str | list[Message]) -> "TextConversation":
        """Start a conversation; a string becomes a message of the user."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        return TextConversation(self, messages)

    async def answer(self, messages: list[Message], max_tokens: int | None, stop: Sequence[str]) -> tuple[str, str]:
        """The text of the seat's next turn, and why it ended."""
        if not isinstance(self.seat, Seat):
            return await self.seat.answer(messages), "stop"
        body: dict[str, Any] = {"model": self.seat.model or self.name, "messages": messages}
        body |= {"max_tokens": max_tokens or self.max_tokens, "temperature": self.temperature}
        body |= {"stop": [*stop]} if stop else {}
        headers = {"Authorization": f"Bearer {self.seat.key}"} if self.seat.key else {}
        where = f"the seat {self.name!r} at {self.seat.url}"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=None)) as client,
                client.post(f"{self.seat.address}/chat/completions", json=body, headers=headers) as got,
            ):
                status, said = got.status, (await got.read()).decode("utf-8", "replace")
        except (ClientError, OSError) as error:
            raise ValueError(f"{where} does not answer: {error}") from error
        if status != 200:
            raise ValueError(f"{where} answers with status {status}: {said[:300]}")
        try:
            return _turn(json.loads(said))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{where} answers with something other than a chat completion of OpenAI's API, whose"
                f" choices[0].message.content is text: {said[:300]!r}. Does its url end with /v1?"
            ) from error


def _turn(answer: Any) -> tuple[str, str]:
    """Text and finish reason of a chat completion; ValueError, LookupError or TypeError for something else."""
    choice = answer["choices"][0]
    text = choice["message"].get("content") or "" if isinstance(choice["message"], dict) else None
    if not isinstance(text, str):
        raise TypeError(f"the content is {text!r}")
    return text, choice.get("finish_reason") or "stop"


@dataclass(eq=False)
class TextConversation:
    """A conversation of a `TextSeat`, with the methods of an `Episode` that a game needs.

    Attributes:
        messages: the whole conversation.
    """

    seat: TextSeat
    messages: list[Message]

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = (), train: bool = False) -> Any:
        """The seat's next turn, as a `Reply` without tokens."""
        from covey.rollout.episode import Reply

        text, ended = await self.seat.answer([dict(one) for one in self.messages], max_tokens, stop)
        self.messages.append({"role": "assistant", "content": text})
        return Reply(text, [], FinishReason.LENGTH if ended == "length" else FinishReason.STOP)

    def write(self, content: str | Message | Sequence[Message]) -> bool:
        """Append messages; a string is a message of the user."""
        if isinstance(content, str):
            content = {"role": "user", "content": content}
        self.messages += [dict(content)] if isinstance(content, dict) else [dict(one) for one in content]
        return True
