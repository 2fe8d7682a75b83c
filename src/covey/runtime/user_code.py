"""Running code that may hang, from a coroutine that must not.

`run_in_thread` gives each call of an ordinary function a thread of its own: one that never returns costs itself and
nobody else, and is not waited for when the process ends. `CoroutineLoop` runs coroutines on one event loop of their
own, so that clients which tools keep between calls stay valid, and replaces that loop should one of them block it.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from covey.runtime.error_text import describe
from covey.runtime.kill_thread import Stop, stop_thread
from covey.runtime.loop_thread import LoopThread

T = TypeVar("T")


class TimedOut(Exception):
    """The deadline passed."""


class Raised(Exception):
    """The code raised.

    Attributes:
        error: what, wrapped, since not every exception may pass through a coroutine.
        text: kind and message, as `describe` gives them: read where the code ran, under its deadline.
    """

    def __init__(self, error: BaseException):
        self.text = describe(error)
        super().__init__(self.text)
        self.error = error

    def told(self) -> str:
        """The text, where that is all that is needed: the error and all that its traceback keeps alive is let go."""
        self.error = RuntimeError(self.text)
        return self.text


async def run_in_thread(function: Callable[[], T], seconds: float) -> T:
    """Return `function()`, run on a new thread; raise `TimedOut` once `seconds` have passed, `Raised` if it raises.

    A late thread is told to stop, which reaches Python code and not a call into C that does not return.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        with suppress(Stop):  # it may come when all is done
            try:
                settle(future, result=context.run(function))
            except BaseException as error:  # SystemExit too: it must not pass for an answer
                settle(future, error=error)

    thread = threading.Thread(target=work, name="covey-tool", daemon=True)
    thread.start()
    try:
        return await _within(future, seconds)
    except (TimedOut, asyncio.CancelledError):
        stop_thread(thread)
        raise


async def _within(future: "Future[T]", seconds: float) -> T:
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting}, timeout=max(seconds, 0.0))
        if waiting.done():
            return waiting.result()
        raise TimedOut
    finally:
        waiting.cancel()  # nobody will ask what becomes of it


def settle(future: "Future[Any]", result: Any = None, error: BaseException | None = None) -> None:
    """Answer whoever waits for a future, with a result or with `Raised`."""
    with suppress(InvalidStateError):  # nobody waits any more
        future.set_result(result) if error is None else future.set_exception(Raised(error))


class Handover:
    """Callbacks for another event loop. Those of one turn of the loop that gives them run in one turn of the other.

    So what begins at the same moment here begins at the same moment there, however the two threads take turns.

    Args:
        there: the loop that runs them.
    """

    def __init__(self, there: asyncio.AbstractEventLoop):
        self.there = there
        self._waiting: list[Callable[[], Any]] = []

    def give(self, callback: Callable[[], Any]) -> None:
        """Have it run there. Called from a loop, always the same one; callbacks keep their order."""
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._give_all)

    def _give_all(self) -> None:
        waiting, self._waiting = self._waiting, []

        def run() -> None:
            for callback in waiting:
                callback()

        with suppress(RuntimeError):  # it is closed: nobody there waits any more
            self.there.call_soon_threadsafe(run)


class Handovers:
    """From any event loop to another, one `Handover` for each pair."""

    def __init__(self) -> None:
        self._from: WeakKeyDictionary[asyncio.AbstractEventLoop, Handover] = WeakKeyDictionary()

    def to(self, there: asyncio.AbstractEventLoop) -> Handover:
        """From the loop that is running."""
        here = asyncio.get_running_loop()
        known = self._from.get(here)
        if known is None or known.there is not there:
            known = self._from[here] = Handover(there)
        return known


class CoroutineLoop:
    """An event loop on a daemon thread, shared by the async tools of a run and started with the first call.

    It lives until `close`, or until nobody refers to this object any more.
    """

    def __init__(self) -> None:
        self._served: LoopThread | None = None
        self._lock = threading.Lock()
        self._handovers = Handovers()

    async def run(self, start: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Return `await start()`, or raise `TimedOut` once `seconds` have passed or `Raised` if it raises.

        What is run in one turn of the caller's loop begins in one turn of this one. A late coroutine is cancelled. If
        it blocks the loop, the next call gets a new one; other calls that are under way on the blocked loop wait for it
        until their own deadlines.
        """
        served = self._running()
        loop = served.loop
        future: Future[T] = Future()
        task: list[asyncio.Task[None]] = []

        async def work() -> None:
            try:
                settle(future, result=await start())
            except BaseException as error:  # SystemExit would end the loop for everybody
                settle(future, error=error)

        there = self._handovers.to(loop)
        there.give(lambda: task.append(loop.create_task(work())))
        with served.used():
            try:
                return await _within(future, seconds)
            except (TimedOut, asyncio.CancelledError):
                there.give(lambda: task[0].cancel())
                if not await _responds(loop):
                    self._abandon(served)
                raise

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop and come back at once. For code that is trusted not to block."""
        return asyncio.run_coroutine_threadsafe(work, self._running().loop)

    def close(self) -> None:
        """Let the thread end; the next call starts another."""
        with self._lock:
            served, self._served = self._served, None
        if served is not None:
            served.end()

    def is_here(self) -> bool:
        """Whether this code runs on the loop's thread, where nothing may wait for the loop."""
        return self._served is not None and threading.current_thread() is self._served.thread

    def _running(self) -> LoopThread:
        with self._lock:
            if self._served is None or not self._served.thread.is_alive():
                self._served = LoopThread(self, "covey-async-tools")
            return self._served

    def _abandon(self, served: LoopThread) -> None:
        """Have the next call start another loop; this one ends with the last call that is under way on it."""
        with self._lock:
            if self._served is served:
                self._served = None
        served.unwanted = True
        served.is_blocked()
        stop_thread(served.thread, served.is_blocked)


_RESPONSE_SECONDS = 1.0


async def _responds(loop: asyncio.AbstractEventLoop) -> bool:
    answer: Future[None] = Future()
    try:
        loop.call_soon_threadsafe(lambda: settle(answer))
        await _within(answer, _RESPONSE_SECONDS)
    except (TimedOut, RuntimeError):  # the latter from a loop that is closed
        return False
    return True


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def finish(awaitable: Awaitable[T]) -> T:
    """Wait, on a thread without a loop, for what an ordinary function returned to be awaited."""

    async def wait() -> T:
        return await awaitable

    return asyncio.run(wait())
