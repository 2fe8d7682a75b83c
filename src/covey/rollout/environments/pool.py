"""`EnvironmentPool`: environments of a run, one for each rollout under way, reset and used again.

A rollout takes one with `acquire` and keeps it until its rewards are scored. One that hung or failed is thrown away
(`discard`), so what it holds reaches no other rollout. Each is closed exactly once: when it is thrown away, at the end
of training, when training fails or is interrupted, and at the latest when the process ends. Not here: what a rollout
does with it (`agent`).
"""

import asyncio
import concurrent.futures
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from covey.rollout.environments.calls import Caller, EnvironmentFailed, as_is
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import format_error

T = TypeVar("T")

CLOSING_GRACE = 1.0
"""Seconds beyond the deadline of `close` that the pool waits for all of them."""


class EnvironmentWarning(UserWarning):
    """Something is wrong with an environment, and the run goes on."""


class Held:
    """An environment that a rollout holds.

    Attributes:
        environment: the object that the factory made.
        caller: calls its methods.
    """

    def __init__(self, environment: Any, caller: Caller):
        self.environment = environment
        self.caller = caller

    @property
    def kind(self) -> str:
        """Its class, for messages."""
        return type(self.environment).__name__

    async def call(self, method: str, check: Callable[[Any, str], T], /, *args: Any, **kwargs: Any) -> T:
        """Call a method; `check` makes of the answer what is needed, and is told the method's name.

        Raises:
            EnvironmentFailed: it raised or was late, or returned what cannot be used.
        """
        name = f"{self.kind}.{method}"
        checked = partial(_checked, check, name)
        return await self.caller.call(name, getattr(self.environment, method), checked, *args, **kwargs)


def _checked(check: Callable[[Any, str], T], name: str, answer: Any) -> T:
    return check(answer, name)


class EnvironmentPool:
    """Makes, lends and closes environments.

    Args:
        factory: makes one; called without arguments.
        seconds: deadline of each call of a method, and of the factory.
        limit: most of them at a time; rollouts wait for one to come back. None: as many as there are rollouts.

    Attributes:
        loop: runs the async methods of all of them.
    """

    def __init__(self, factory: Callable[[], Any], seconds: float, limit: int | None = None):
        self.factory = factory
        self.seconds = seconds
        self.limit = limit
        self.loop = LoopThread("covey-async-tools")
        self._shelf = _Shelf()
        self._closing: set[Future[None]] = set()
        self._making = 0
        self._waiting: deque[Future[None]] = deque()
        # Neither the callback nor what it refers to may keep the pool alive.
        self._at_end = weakref.finalize(self, _close_all, self._shelf, self.loop, self._closing, seconds)

    def __len__(self) -> int:
        """How many there are, lent or not."""
        return len(self._shelf.idle) + len(self._shelf.lent)

    async def acquire(self) -> Held:
        """One that nobody else holds: used before, or made now.

        Raises:
            EnvironmentFailed: the factory raised or was late, or made one that is already there.
        """
        while True:
            with self._shelf.lock:
                if self._shelf.idle:
                    held = self._shelf.idle.pop()
                    self._shelf.lent[id(held.environment)] = held
                    return held
                free = self.limit is None or len(self._shelf.lent) + self._making < self.limit
                turn: Future[None] = Future()
                if free:
                    self._making += 1
                else:
                    self._waiting.append(turn)
            if free:
                return await self._make()
            try:
                await asyncio.wrap_future(turn)
            except asyncio.CancelledError:
                self._next()  # had it been this one's turn, it is another's now
                raise

    async def _make(self) -> Held:
        caller = Caller(self.loop, self.seconds)
        try:
            environment = await caller.call("environment_factory", self.factory, as_is)
            with self._shelf.lock:
                if self._shelf.knows(environment):
                    raise EnvironmentFailed(
                        f"environment_factory returned the same {type(environment).__name__} twice; make a new object"
                        " in every call, since rollouts that run side by side each need one of their own"
                    )
                held = Held(environment, caller)
                self._shelf.lent[id(environment)] = held
            return held
        except BaseException:
            caller.end()
            self._next()
            raise
        finally:
            with self._shelf.lock:
                self._making -= 1

    def release(self, environment: Any) -> None:
        """Take one back, to be used by another rollout; one that was given up is thrown away."""
        with self._shelf.lock:
            held = self._shelf.lent.pop(id(environment), None)
            if held is not None and held.caller.lost is None:
                self._shelf.idle.append(held)
        if held is not None and held.caller.lost is not None:
            self._begin_closing(held)
        self._next()

    def discard(self, held: Held) -> None:
        """Throw one away: it is closed, without waiting for that."""
        with self._shelf.lock:
            known = self._shelf.lent.pop(id(held.environment), None)
        if known is not None:
            self._begin_closing(held)
        self._next()

    def close(self) -> None:
        """Close all of them, and wait for that until the deadline. May be called again; `acquire` makes new ones."""
        _close_all(self._shelf, self.loop, self._closing, self.seconds)

    def _next(self) -> None:
        """Whoever has waited longest may look again."""
        with self._shelf.lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():  # else it has been given up
                    turn.set_result(None)
                    return

    def _begin_closing(self, held: Held) -> None:
        future = self.loop.start(_close(held, self._shelf, self.loop, self.seconds))
        self._closing.add(future)
        future.add_done_callback(self._closing.discard)


class _Shelf:
    """Which environments there are, and what went wrong with those that there were."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may run while it is held
        self.idle: list[Held] = []
        self.lent: dict[int, Held] = {}
        self.unclosed: list[str] = []

    def knows(self, environment: Any) -> bool:
        return id(environment) in self.lent or any(held.environment is environment for held in self.idle)

    def clear(self) -> list[Held]:
        with self.lock:
            everything = [*self.idle, *self.lent.values()]
            self.idle.clear()
            self.lent.clear()
        return everything


def _close_all(shelf: _Shelf, loop: LoopThread, closing: "set[Future[None]]", seconds: float) -> None:
    everything = shelf.clear()
    waiting = list(closing)
    try:
        waiting += [loop.start(_close(held, shelf, loop, seconds)) for held in everything]
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        for held in everything:
            _close_here(held, shelf)
    if loop.is_current_thread():  # collected as garbage there: the closing cannot be waited for
        return
    late = concurrent.futures.wait(waiting, timeout=seconds + CLOSING_GRACE).not_done
    shelf.unclosed += ["it took too long"] * len(late)
    loop.close()
    if shelf.unclosed:
        many = "an environment" if len(shelf.unclosed) == 1 else f"{len(shelf.unclosed)} environments"
        message = f"{many} could not be closed: {shelf.unclosed[0]}."
        shelf.unclosed.clear()
        warnings.warn(message, EnvironmentWarning, stacklevel=3)


async def _close(held: Held, shelf: _Shelf, loop: LoopThread, seconds: float) -> None:
    """Close an environment; what goes wrong is noted."""
    close = getattr(held.environment, "close", None)
    try:
        if callable(close):
            # The thread of one that was given up may never come back.
            caller = held.caller if held.caller.lost is None else Caller(loop, seconds)
            await caller.call(f"{held.kind}.close", close, as_is)
            caller.end()
    except Exception as error:
        shelf.unclosed.append(str(error) if isinstance(error, EnvironmentFailed) else format_error(error))
    finally:
        held.caller.end()


def _close_here(held: Held, shelf: _Shelf) -> None:
    close = getattr(held.environment, "close", None)
    try:
        if callable(close):
            close()
    except Exception as error:
        shelf.unclosed.append(format_error(error))
