"""Functions and coroutines under a deadline: a thread whose call is late is abandoned and counted.

A late call gets one exception that asks it to stop, and is counted until it ends: `LateCalls` bounds the number of
threads that a hanging function can occupy. The main thread, for which reward functions are written (`signal.alarm`,
sqlite connections, the current CUDA device and torch's gradient mode belong to a thread), cannot be abandoned: there a
signal interrupts a late call, as Ctrl-C does, again every second. Code that neither of these ends must run in a process
that can be killed (`covey.runtime.isolation.FunctionWorker`).
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch

from covey.runtime.user_code import settle, warn

T = TypeVar("T")

CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "setitimer")
INTERRUPT_INTERVAL = 1.0  # seconds between two interrupts of a call, for its cleanup
BLOCKED_SECONDS = 10.0  # after its deadline a call on the main thread counts as one that interrupts do not end
WAIT_SECONDS = 5.0  # that the next call waits for a late one, from the time when it was late
MAX_STILL_RUNNING = 4  # late calls of one function that still run, from which on it is not called
EXIT_SECONDS = 2.0  # for running calls when Python exits


class CallTimeout(TimeoutError):
    """The deadline of a call has passed."""


class StillRunning(CallTimeout):
    """A function was not called, because late calls of it are still running."""


class LateCallWarning(UserWarning):
    """Warning that a user's function is not called for now: late calls of it still run and cannot be stopped."""


class Interrupt(BaseException):
    """Raised in a late function on the main thread. Not an `Exception`: `except Exception` does not catch it."""


class StopThread(BaseException):
    """Raised once in a late call on another thread."""


class LateCalls:
    """Late calls of one function that still run; with `limit` of them, further calls raise `StillRunning`.

    A thread that waits in C code cannot be stopped, so each late call may occupy a thread until the process ends. With
    a limit of 1, calls that are made one after another never overlap.
    """

    def __init__(self, name: str, limit: int = MAX_STILL_RUNNING):
        self.name, self._limit = name, limit
        self._calls: dict[Future[Any], float] = {}  # with their deadlines by `time.monotonic`
        self._lock = threading.Lock()
        self._warned = False

    def add(self, call: "Future[Any]", late_in: float = 0.0) -> None:
        """Count a call as late, from `late_in` seconds from now until it ends."""
        with self._lock:
            self._calls[call] = time.monotonic() + late_in

    def running(self) -> "dict[Future[Any], float]":
        with self._lock:
            self._calls = {call: since for call, since in self._calls.items() if not call.done()}
            return {call: since for call, since in self._calls.items() if since <= time.monotonic()}

    @property
    def is_full(self) -> bool:
        return len(self.running()) >= self._limit

    def wait(self) -> None:
        """Wait until the function may be called, but not longer than `WAIT_SECONDS` after the last call was late."""
        while len(running := self.running()) >= self._limit:
            left = max(running.values()) + WAIT_SECONDS - time.monotonic()
            if left <= 0 or not concurrent.futures.wait(running, left, concurrent.futures.FIRST_COMPLETED).done:
                return

    def check(self) -> None:
        """Raise StillRunning if the limit is reached; the first time with a warning."""
        running = self.running()
        if len(running) < self._limit:
            return
        calls = f"{len(running)} calls of it that were late still run" if len(running) > 1 else "a late call still runs"
        if not self._warned:
            self._warned = True
            warn(
                f"{self.name} is not called again until one of its late calls has returned: {calls} and cannot be"
                " stopped, as in C code or while it waits. Give whatever it waits for (a connection, a lock, a program)"
                " a timeout of its own; a reward function can be marked with covey.isolated, which kills its process.",
                LateCallWarning,
            )
        raise StillRunning(f"it was not called, because {calls} ({time.monotonic() - min(running.values()):.0f} s)")

    def warn_of_main_thread(self, seconds: float) -> None:
        """Warn, once, that the main thread waits for a call that its interrupts do not end."""
        if self._warned:
            return
        self._warned = True
        warn(
            f"{self.name} has not returned {BLOCKED_SECONDS:g} s after its deadline of {seconds:g} s, and the main"
            " thread waits for it: it catches every exception, or is in C code. Training continues when it returns."
            " Give whatever it waits for a timeout of its own, and let it pass on exceptions that are no `Exception`."
            " Mark a tool or an environment with @covey.threaded, so that such a call is left behind, and a reward"
            " function with @covey.isolated, which kills its process.",
            LateCallWarning,
        )


def call_with_deadline(function: Callable[[], T], seconds: float, late: LateCalls) -> T:
    """Return `function()`, or raise `CallTimeout`.

    On the main thread a late function is interrupted, again every second until it ends; one that catches all of these
    interrupts, or is in C code that checks for no signals, holds the thread, with a warning. Elsewhere a late call is
    in `late` until it ends.
    """
    if seconds <= 0:
        raise CallTimeout
    if can_interrupt_here():
        return _call_interruptibly(function, seconds, late)
    with closing(WorkerThread("covey-reward", torch_settings())) as worker:
        return worker.call(function, seconds, late)


def can_interrupt_here() -> bool:
    """True on the main thread of a system with signals of threads."""
    return CAN_INTERRUPT and threading.current_thread() is threading.main_thread()


# ---- from coroutines -------------------------------------------------------------------------------------------------


async def run_in_thread(function: Callable[[], T], seconds: float, late: LateCalls) -> T:
    """Return `function()`, run on a new thread, or raise UserCodeError; CallTimeout stops a late one.

    One that is not awaited any longer is in `late` from its deadline until it ends.
    """
    late.check()
    worker, until = WorkerThread("covey-tool", wrap_errors=True), time.monotonic() + seconds
    future = worker.submit(partial(contextvars.copy_context().run, function))
    worker.close()
    try:
        return await await_future(future, seconds)
    except (CallTimeout, asyncio.CancelledError):
        late.add(future, until - time.monotonic())
        worker.stop()
        raise


async def await_future(future: "Future[T] | asyncio.Future[T]", seconds: float) -> T:
    """Result of a future or task, or `CallTimeout`, after which it is cancelled without waiting for its end."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting}, timeout=max(seconds, 0.0))
        if waiting.done():
            return waiting.result()
        raise CallTimeout
    finally:
        waiting.cancel()


# ---- on the main thread ----------------------------------------------------------------------------------------------

_next_interrupt = 0.0  # time of the innermost call's next interrupt, by `time.monotonic`


def _call_interruptibly(function: Callable[[], T], seconds: float, late: LateCalls) -> T:
    """Run `function` under two clocks that send the same signal, after `seconds` and then every second.

    A thread with the wall clock interrupts code that waits; a timer of CPU time interrupts code that computes and never
    lets another thread run. The handler stays installed, because a late signal must not meet the default action, which
    ends the process.
    """
    global _next_interrupt
    outer, begun = _next_interrupt, time.monotonic()
    main_thread, done = threading.get_ident(), threading.Event()

    def send_signals() -> None:
        wait = seconds
        while not done.wait(wait):
            signal.pthread_kill(main_thread, signal.SIGVTALRM)
            wait = INTERRUPT_INTERVAL
            if time.monotonic() > begun + seconds + BLOCKED_SECONDS:
                late.warn_of_main_thread(seconds)

    clock = threading.Thread(target=send_signals, name="covey-deadline", daemon=True)
    try:
        _next_interrupt = begun + seconds
        install_interrupts()
        clock.start()
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, INTERRUPT_INTERVAL)
        result = _interruptible(function)
        if _next_interrupt != begun + seconds:  # the function caught an interrupt, so its result does not count
            raise CallTimeout
        return result
    except Interrupt:
        raise CallTimeout from None
    finally:
        _next_interrupt = outer
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        done.set()
        if clock.ident is not None:
            clock.join()


def install_interrupts() -> None:
    """Install the handler, so that `interrupt_call` of another thread finds it; on the main thread."""
    signal.signal(signal.SIGVTALRM, _on_signal)


def interrupt_call() -> None:
    """Interrupt the main thread's innermost call as if its deadline had passed; without a call, do nothing."""
    global _next_interrupt
    _next_interrupt = 0.0
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)


def _interruptible(function: Callable[[], T]) -> T:
    return function()  # a mark on the stack: only frames above this one are interrupted


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _next_interrupt
    now = time.monotonic()
    if now >= _next_interrupt and _is_interruptible(frame):
        _next_interrupt = now + INTERRUPT_INTERVAL  # each of the two clocks sends a signal; the second is ignored
        raise Interrupt


def _is_interruptible(frame: FrameType | None) -> bool:
    """True if the code that the signal interrupted belongs to the function of the innermost call."""
    while frame is not None and frame.f_code is not _call_interruptibly.__code__:
        if frame.f_code is _interruptible.__code__:
            return True
        frame = frame.f_back
    return False


# ---- on other threads ------------------------------------------------------------------------------------------------


class WorkerThread:
    """Daemon thread that runs functions one after another, in the context of `settings`; errors may be wrapped."""

    def __init__(
        self, name: str, settings: Callable[[], AbstractContextManager[Any]] = nullcontext, wrap_errors: bool = False
    ):
        self._name, self._settings, self._wrap_errors = name, settings, wrap_errors
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        return future

    def call(self, function: Callable[[], T], seconds: float, late: LateCalls) -> T:
        """Return `function()`, or raise `CallTimeout`; a late call is in `late`, the next one gets a new thread."""
        if seconds <= 0:
            raise CallTimeout
        future = self.submit(function)
        if not concurrent.futures.wait([future], seconds).done:
            late.add(future)
            self.stop()
            self._jobs, self._thread = SimpleQueue(), None
            raise CallTimeout
        return future.result()

    def close(self) -> None:
        """End the thread after the functions that were submitted."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Raise `StopThread` in the function that runs, once, and end the thread after it."""
        self._jobs.put(None)
        if self._thread is not None:
            raise_in(self._thread)

    def _work(self, jobs: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
        thread = threading.current_thread()
        future: Future[Any] | None = None
        with suppress(StopThread), self._settings():  # it may arrive between two functions
            while (job := jobs.get()) is not None:
                future, function = job
                if not future.set_running_or_notify_cancel():
                    continue
                _busy.add(thread)
                try:
                    settle(future, function())
                except BaseException as error:  # SystemExit too, which would end the thread in silence
                    settle(future, error=error, wrap=self._wrap_errors)
                _busy.discard(thread)
                del job, function  # or the thread keeps the last result alive while it waits
                future = None
        _busy.discard(thread)
        if future is not None:  # stopped just before or after its function ran
            settle(future, error=StopThread(), wrap=self._wrap_errors)


_busy: set[threading.Thread] = set()  # of worker threads


@atexit.register
def _stop_calls() -> None:
    """Stop running calls: a thread that is inside torch when Python (before 3.14) exits aborts the process."""
    until = time.monotonic() + EXIT_SECONDS
    for thread in list(_busy):
        raise_in(thread)
        while thread in _busy and time.monotonic() < until:
            time.sleep(0.01)


def torch_settings(no_grad: bool = False) -> Callable[[], AbstractContextManager[None]]:
    """Make a context that gives another thread this thread's gradient mode, CUDA device and CPU threads.

    Without it, a thread would use the number of CPU threads that was set last in any thread; engines change it while
    they decode.
    """
    grad_enabled = torch.is_grad_enabled() and not no_grad
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    threads = torch.get_num_threads()

    @contextmanager
    def settings() -> Iterator[None]:
        torch.set_num_threads(threads)
        with torch.set_grad_enabled(grad_enabled), nullcontext() if device is None else torch.cuda.device(device):
            yield

    return settings


def raise_in(thread: threading.Thread) -> None:
    """Raise `StopThread` in the Python code of a thread; a call into C notices it only when it returns."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StopThread))
