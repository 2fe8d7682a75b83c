"""Calls into one environment: one after another, each under a deadline, whatever the environment does.

Ordinary methods run on a thread that belongs to the environment, so that what it opened in `reset` (a database, say)
is used by the thread that opened it. Async methods share an event loop that lives as long as the run, so that clients
can be kept. Not here: which environments there are (`pool`), and what is made of their answers (`results`).
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from covey.runtime.kill_thread import Stop, stop_thread
from covey.runtime.user_code import CoroutineLoop, Raised, TimedOut, finish, is_async, settle


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered with something that cannot be used; the message says which and what."""


def as_is(answer: Any) -> Any:
    """An answer that is not looked at."""
    return answer


class EnvironmentThread:
    """A thread on which the ordinary methods of one environment run. Started with the first of them."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_work = False

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """`function()` once what came before is done; the future's exception is `Raised`."""
        future: Future[Any] = Future()
        self._jobs.put((future, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="covey-environment", daemon=True)
            self._thread.start()
        return future

    def give_up(self) -> None:
        """Stop what runs, as far as a thread can be stopped, and take no more."""
        self._jobs.put(None)
        if self._thread is not None:
            stop_thread(self._thread, lambda: self._at_work)

    def end(self) -> None:
        """Take no more once what was submitted is done."""
        self._jobs.put(None)

    def _work(self) -> None:
        with suppress(Stop):  # told to stop while it was about to
            while (job := self._jobs.get()) is not None:
                future, function = job
                if not future.set_running_or_notify_cancel():
                    continue
                self._at_work = True
                try:
                    settle(future, result=function())
                except BaseException as error:  # SystemExit too: it must not pass for an answer
                    self._at_work = False
                    settle(future, error=error)
                self._at_work = False
                del job, future, function  # a waiting thread must not keep the last answer alive


class Caller:
    """Calls functions of one environment under a deadline.

    Args:
        loop: runs async functions; shared by all environments of a run.
        seconds: the deadline of each call, the wait for earlier calls included (`tool_timeout`).

    Attributes:
        lost: why the environment can be used no more, or None. A call that was given up may still be at work on it.
    """

    def __init__(self, loop: CoroutineLoop, seconds: float):
        self.seconds = seconds
        self.lost: str | None = None
        self._loop = loop
        self._thread = EnvironmentThread()
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def call(
        self, name: str, function: Callable[..., Any], read: Callable[[Any], Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What `read` makes of what the function returns.

        Args:
            name: of the function, for messages.
            function: ordinary or async.
            read: called under the same deadline, since looking at an answer may run the answer's own code.
            args, kwargs: the function's arguments.

        Raises:
            EnvironmentFailed: it raised or was late, or an earlier one was; or what `read` says.
        """
        try:
            return await self.raw_call(name, function, read, *args, **kwargs)
        except TimedOut:
            raise EnvironmentFailed(f"{name} took longer than tool_timeout={self.seconds:g} s") from None
        except Raised as raised:
            if isinstance(raised.error, EnvironmentFailed):
                raise raised.error from None
            raise EnvironmentFailed(f"{name} raised {raised.text}") from raised.error

    async def raw_call(
        self, name: str, function: Callable[..., Any], read: Callable[[Any], Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The same, for callers that tell failures apart.

        Raises:
            TimedOut, Raised: as `covey.runtime.user_code.run_in_thread`.
            EnvironmentFailed: an earlier call was given up.
        """
        if self.lost is not None:
            raise EnvironmentFailed(self.lost)
        if is_async(function):

            async def start() -> Any:
                return read(await function(*args, **kwargs))

            return await self._on_loop(name, start)

        def run() -> Any:
            result = function(*args, **kwargs)
            return read(finish(result) if inspect.isawaitable(result) else result)

        return await self._on_thread(name, run)

    def end(self) -> None:
        """Let the thread go."""
        self._thread.end()

    async def _on_thread(self, name: str, run: Callable[[], Any]) -> Any:
        future = self._thread.submit(run)
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiting}, timeout=self.seconds)
            if waiting.done():
                return waiting.result()
            raise TimedOut
        except (TimedOut, asyncio.CancelledError):
            waiting.cancel()
            if not (future.cancel() or future.done()):  # it has begun
                self.lose(name)
                self._thread.give_up()
            raise

    async def _on_loop(self, name: str, start: Callable[[], Awaitable[Any]]) -> Any:
        begun = False

        async def take_turn() -> Any:
            nonlocal begun
            async with self._lock():
                begun = True
                return await start()

        try:
            return await self._loop.run(take_turn, self.seconds)
        except (TimedOut, asyncio.CancelledError):
            if begun:
                self.lose(name)
            raise

    def _lock(self) -> asyncio.Lock:
        """One call at a time; the loop is replaced where something blocks it."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1]

    def lose(self, name: str) -> None:
        """A call was given up, so nobody knows any more what state the environment is in."""
        self.lost = self.lost or f"{name} was given up after {self.seconds:g} s or less, and may still be at work"
