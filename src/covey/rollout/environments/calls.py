"""Calls into one environment: one after another, each under a deadline, whatever the environment does.

Ordinary methods run on a thread that belongs to the environment, so that what it opened in `reset` (a database, say)
is used by the thread that opened it. Async methods share an event loop that lives as long as the run, so that clients
can be kept. Not here: which environments there are (`pool`), and what is made of their answers (`results`).
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from covey.runtime.deadlines import CallTimeout, await_future
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import UserCodeError, is_async, run_awaitable
from covey.runtime.worker_thread import WorkerThread


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered with something that cannot be used; the message says which and what."""


def as_is(answer: Any) -> Any:
    """An answer that is not looked at."""
    return answer


class Caller:
    """Calls functions of one environment under a deadline.

    Args:
        loop: runs async functions; shared by all environments of a run.
        seconds: the deadline of each call, the wait for earlier calls included (`tool_timeout`).

    Attributes:
        lost: why the environment can be used no more, or None. A call that was given up may still be at work on it.
    """

    def __init__(self, loop: LoopThread, seconds: float):
        self.seconds = seconds
        self.lost: str | None = None
        self._loop = loop
        self._thread = WorkerThread("covey-environment", wrap_errors=True)
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
        except CallTimeout:
            raise EnvironmentFailed(f"{name} took longer than tool_timeout={self.seconds:g} s") from None
        except UserCodeError as raised:
            if isinstance(raised.error, EnvironmentFailed):
                raise raised.error from None
            raise EnvironmentFailed(f"{name} raised {raised.text}") from raised.error

    async def raw_call(
        self, name: str, function: Callable[..., Any], read: Callable[[Any], Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The same, for callers that tell failures apart.

        Raises:
            CallTimeout, UserCodeError: as `covey.runtime.deadlines.run_in_thread`.
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
            return read(run_awaitable(result) if inspect.isawaitable(result) else result)

        return await self._on_thread(name, run)

    def end(self) -> None:
        """Let the thread go."""
        self._thread.close()

    async def _on_thread(self, name: str, run: Callable[[], Any]) -> Any:
        future = self._thread.submit(run)
        try:
            return await await_future(future, self.seconds)
        except (CallTimeout, asyncio.CancelledError):
            if not (future.cancel() or future.done()):  # it has begun
                self.lose(name)
                self._thread.stop()
            raise

    async def _on_loop(self, name: str, start: Callable[[], Awaitable[Any]]) -> Any:
        begun = False

        async def take_turn() -> Any:
            nonlocal begun
            async with self._lock():
                begun = True
                return await start()

        try:
            return await self._loop.call(take_turn, self.seconds)
        except (CallTimeout, asyncio.CancelledError):
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
