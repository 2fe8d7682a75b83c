"""Coroutines on a separate event loop, whose calls of ordinary functions run on the thread that waits for them.

Tools, environments and reward functions are usually written for the main thread: `signal.alarm`, sqlite connections and
`threading.local` belong to a thread. Their calls run there one after another, while the loop continues to sample. A
function or class that may be called on several threads at once is marked with `threaded`.
"""

import asyncio
import contextvars
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch

from covey.runtime import deadlines
from covey.runtime.deadlines import (
    CallTimeout,
    Interrupt,
    LateCalls,
    call_with_deadline,
    can_interrupt_here,
    install_interrupts,
    interrupt_call,
    run_in_thread,
)
from covey.runtime.interrupts import Interrupted
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import UserCodeError, settle, unwrap_partial

T = TypeVar("T")
Marked = TypeVar("Marked", bound=Callable[..., Any])

MARK = "__covey_threaded__"


def threaded(tool: Marked) -> Marked:
    """Mark a tool, a seat's function or a class of environments, whose calls may run on several threads at a time.

    Without the mark, ordinary tools and ordinary methods of environments are called on the main thread, one after
    another; a seat's function is called on other threads, one call after another. With it, calls that wait for a
    network or a process wait concurrently; each environment has a thread of its own. Coroutine functions need no mark.

    Example:
        ```python
        @covey.threaded
        def search(query: str) -> str:
            \"\"\"Search the index.

            Args:
                query: Words to search for.
            \"\"\"
            return requests.get(INDEX, params={"q": query}, timeout=10).text
        ```
    """
    setattr(tool, MARK, True)
    return tool


def is_threaded(function: Any) -> bool:
    """True for a function or class that is marked with `threaded`, and for methods and instances of the class."""
    function = unwrap_partial(function)
    return bool(getattr(function, MARK, False) or getattr(getattr(function, "__self__", None), MARK, False))


@dataclass(eq=False)
class _Job:
    function: Callable[[], Any]
    seconds: float
    late: LateCalls
    begun: "Future[None]" = field(default_factory=Future)
    result: "Future[Any]" = field(default_factory=Future)


class CallingThread:
    """Runs coroutines on an event loop of its own thread, and their `call_here`s on the thread that called `run`."""

    def __init__(self, name: str):
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # of `_current`
        self._current: _Job | None = None
        self._stopped = False  # by Ctrl-C; a KeyboardInterrupt that a function raises itself only fails its call
        self.blocked = False  # True while a call runs that interrupts do not end

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine. Off the main thread, where calls cannot be interrupted, each gets a new thread."""
        loop = LoopThread(self._name, no_grad=True)
        try:
            return self._wait(loop, work) if can_interrupt_here() else loop.run(work)
        finally:
            loop.close(seconds=5.0)  # also when the wait is interrupted: what it waited for must not continue

    def _wait(self, loop: LoopThread, work: Coroutine[Any, Any, T]) -> T:
        install_interrupts()
        jobs = self._jobs = SimpleQueue()  # what an earlier, interrupted run has left is not performed

        async def with_calls() -> T:
            _CALLING.set(self)
            return await work

        future = loop.start(with_calls())
        future.add_done_callback(lambda _: jobs.put(None))
        try:
            with self._noting_ctrl_c():
                while (job := jobs.get()) is not None:
                    self._perform(job)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def _noting_ctrl_c(self) -> Iterator[None]:
        self._stopped, handler = False, signal.getsignal(signal.SIGINT)

        def note(number: int, frame: FrameType | None) -> Any:
            self._stopped = True
            return signal.default_int_handler(number, frame)

        if handler is not signal.default_int_handler:  # that of a run raises an exception of its own
            yield
            return
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is note:  # else a function has set another, which is reported
                signal.signal(signal.SIGINT, handler)

    async def call(self, function: Callable[[], T], seconds: float, late: LateCalls, on_begin: Callable[[], None]) -> T:
        job = _Job(partial(contextvars.copy_context().run, function), seconds, late)
        self._jobs.put(job)
        try:
            with _paused():
                await asyncio.wrap_future(job.begun)
            on_begin()
            result = asyncio.wrap_future(job.result)
            result.add_done_callback(lambda one: one.cancelled() or one.exception())  # nobody may await it any more
            if not (await asyncio.wait({result}, timeout=seconds + deadlines.BLOCKED_SECONDS))[0]:
                late.add(job.result)
                late.warn_of_main_thread(seconds)
                self.blocked = True  # until it returns, others are called on threads
                raise CallTimeout
            return result.result()
        except asyncio.CancelledError:
            job.result.cancel()  # if it has not begun
            with self._lock:
                if self._current is job:
                    interrupt_call()
            raise

    def _perform(self, job: _Job) -> None:
        with self._lock:
            if not job.result.set_running_or_notify_cancel():
                return
            self._current = job
        settle(job.begun)
        outcome: Any = None
        error: BaseException | None = None
        try:
            outcome, error = call_with_deadline(partial(_outcome, job.function), job.seconds, job.late)
        except KeyboardInterrupt as raised:
            stopped = self._stopped or isinstance(raised, Interrupted)
            error = raised if stopped else UserCodeError(raised)
        except BaseException as raised:  # CallTimeout
            error = raised
        finally:
            with self._lock:
                self._current = None
            self.blocked = False
            settle(job.result, outcome, error, wrap=False)
        if isinstance(error, KeyboardInterrupt):
            raise error


def _outcome(function: Callable[[], T]) -> tuple[T | None, UserCodeError | None]:
    """Result or exception of a user's function; the exception is formatted here, as that runs code of the user."""
    try:
        with torch.enable_grad():  # the trainer's own code runs without
            return function(), None
    except (Interrupt, CallTimeout, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the run
        return None, UserCodeError(error)


_CALLING: ContextVar[CallingThread | None] = ContextVar("covey_calling_thread", default=None)
# Weak: a task that never ends would keep the rollout, and with it the loop that it runs on.
_PAUSED: ContextVar["weakref.WeakMethod[Callable[[], AbstractContextManager[None]]] | None"] = ContextVar(
    "covey_paused", default=None
)


def wait_within(pause: Callable[[], AbstractContextManager[None]]) -> None:
    """Make this task, and tasks that it starts, wait for the calling thread inside the context `pause()`, a method."""
    _PAUSED.set(weakref.WeakMethod(pause))


def _paused() -> AbstractContextManager[None]:
    reference = _PAUSED.get()
    pause = None if reference is None else reference()
    return nullcontext() if pause is None else pause()


def calls_wait_here() -> bool:
    """True in a coroutine whose ordinary functions are called by the thread that waits for it."""
    calling = _CALLING.get()
    return calling is not None and not calling.blocked


async def call_here(
    function: Callable[[], T],
    seconds: float,
    late: LateCalls,
    *,
    on_begin: Callable[[], None] = lambda: None,
    threaded: bool = False,
) -> T:
    """Return `function()`, called by the thread that waits for this coroutine, or on a new thread.

    A new thread is used if none waits, or if the function is `threaded`. Raises UserCodeError, or CallTimeout if the
    function takes longer than `seconds` once it has begun; one that cannot be stopped is in `late` until it ends.
    """
    calling = _CALLING.get()
    if threaded or calling is None or calling.blocked:
        on_begin()
        return await run_in_thread(function, seconds, late)
    return await calling.call(function, seconds, late, on_begin)
