"""Functions and coroutines under a deadline.

On the main thread a call is interrupted by a signal, as by Ctrl-C, because reward functions are written for it:
`signal.alarm`, sqlite connections, the current CUDA device and torch's gradient mode belong to a thread. Elsewhere it
runs on a thread of its own, which is abandoned when it is late. Code that only a killed process stops runs in a
`covey.runtime.child_process.ScriptWorker`.
"""

import _thread
import asyncio
import concurrent.futures
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from covey.runtime.worker_thread import WorkerThread

T = TypeVar("T")

CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "setitimer")

INTERRUPT_INTERVAL = 1.0
"""Seconds between two interrupts of a call, for its cleanup."""

SPACED_INTERRUPTS = 3
"""Interrupts that a call may catch; from then on every instruction outside the handler raises until the call ends."""


class CallTimeout(TimeoutError):
    """The deadline of a call has passed."""


class Interrupt(BaseException):
    """Raised in a late function on the main thread. Not an `Exception`: `except Exception` does not catch it."""


def call_with_deadline(function: Callable[[], T], seconds: float) -> T:
    """Return `function()`.

    On the main thread a late function is interrupted; one that catches that is interrupted again every second, and
    finally at every instruction. C code that neither returns nor checks for signals cannot be interrupted.

    Raises:
        CallTimeout: it did not return within `seconds`.
    """
    if seconds <= 0:
        raise CallTimeout
    if CAN_INTERRUPT and threading.current_thread() is threading.main_thread():
        return _call_interruptibly(function, seconds)
    calls = CallThread()
    try:
        return calls(function, seconds)
    finally:
        calls.close()


class CallThread:
    """Calls under a deadline on one thread, since starting one can take longer than a short call.

    A thread whose call is late is abandoned, and the next call starts another. It has the torch settings of the thread
    that made this object. One thread at a time may call it.

    Example:
        >>> calls = CallThread()
        >>> calls(lambda: 6 * 7, 10.0)
        42
        >>> calls.close()
    """

    def __init__(self) -> None:
        self._settings = torch_settings()
        self._worker: WorkerThread | None = None

    def __call__(self, function: Callable[[], T], seconds: float) -> T:
        """Return `function()`, or raise `CallTimeout`."""
        if seconds <= 0:
            raise CallTimeout
        if self._worker is None:
            self._worker = WorkerThread("covey-reward", self._settings)
        future = self._worker.submit(function)
        if not concurrent.futures.wait([future], seconds).done:
            self.close()
            raise CallTimeout
        return future.result()

    def close(self) -> None:
        """End the thread after its call."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def torch_settings() -> Callable[[], AbstractContextManager[None]]:
    """Context manager that gives another thread the gradient mode and the CUDA device of this one."""
    grad_enabled = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def settings() -> Iterator[None]:
        with torch.set_grad_enabled(grad_enabled), nullcontext() if device is None else torch.cuda.device(device):
            yield

    return settings


# ---- from coroutines -------------------------------------------------------------------------------------------------


async def run_in_thread(function: Callable[[], T], seconds: float) -> T:
    """Return `function()`, run on a new thread, which is stopped when it is late.

    Raises:
        CallTimeout: it did not return within `seconds`.
        UserCodeError: it raised.
    """
    worker = WorkerThread("covey-tool", wrap_errors=True)
    future = worker.submit(partial(contextvars.copy_context().run, function))
    worker.close()
    try:
        return await await_future(future, seconds)
    except (CallTimeout, asyncio.CancelledError):
        worker.stop()
        raise


async def await_future(future: "Future[T]", seconds: float) -> T:
    """Result of a future that another thread settles; the future is cancelled where it is no longer awaited.

    Raises:
        CallTimeout: it was not settled within `seconds`.
    """
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting}, timeout=max(seconds, 0.0))
        if waiting.done():
            return waiting.result()
        raise CallTimeout
    finally:
        waiting.cancel()


async def await_with_deadline(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return `await coroutine`, or cancel it after `seconds` without waiting for its end.

    Raises:
        CallTimeout: it was late.
    """
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task}, timeout=max(seconds, 0.0))
    if not task.done():
        task.cancel()
        raise CallTimeout
    return task.result()


# ---- on the main thread ----------------------------------------------------------------------------------------------

_next_interrupt = 0.0
"""Time of the innermost call's next interrupt (`time.monotonic`)."""

_interrupts = 0
"""Interrupts that the innermost call has met."""


def _call_interruptibly(function: Callable[[], T], seconds: float) -> T:
    """Run `function` under two clocks that send the same signal, after `seconds` and then every second.

    A thread follows the wall clock and reaches code that waits; a timer follows CPU time and reaches code that computes
    without ever letting another thread run. The handler stays installed: a last signal must not find the default
    action, which ends the process.
    """
    global _next_interrupt, _interrupts
    outer = _next_interrupt, _interrupts
    main_thread, done = threading.get_ident(), threading.Event()

    def send_signals() -> None:
        wait = seconds
        while not done.wait(wait):
            signal.pthread_kill(main_thread, signal.SIGVTALRM)
            wait = INTERRUPT_INTERVAL

    clock = threading.Thread(target=send_signals, name="covey-deadline", daemon=True)
    try:
        _next_interrupt, _interrupts = time.monotonic() + seconds, 0
        signal.signal(signal.SIGVTALRM, _on_signal)
        clock.start()
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, INTERRUPT_INTERVAL)
        return _interruptible(function)
    except Interrupt:
        raise CallTimeout from None
    finally:
        _next_interrupt, _interrupts = outer
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        done.set()
        if clock.ident is not None:
            clock.join()


def _interruptible(function: Callable[[], T]) -> T:
    """Marks the stack: only frames above this one are interrupted."""
    return function()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _next_interrupt, _interrupts
    now = time.monotonic()
    if now < _next_interrupt or not _is_interruptible(frame):
        return
    _interrupts += 1
    if _interrupts <= SPACED_INTERRUPTS:
        _next_interrupt = now + INTERRUPT_INTERVAL
    else:
        _SIGNAL.again  # noqa: B018 (it has an effect)
    raise Interrupt


class _Signal(int):
    """Signal that this thread sends to itself and handles only once the calling function has returned.

    A property that is a C function is not a call after which Python handles signals. So the signal is handled in the
    frame that catches the previous one: in the body of its `except`, or in the code that follows.
    """

    again = property(_thread.interrupt_main)


_SIGNAL = _Signal(getattr(signal, "SIGVTALRM", signal.SIGINT))


def _is_interruptible(frame: FrameType | None) -> bool:
    """True if the code that the signal interrupted belongs to the function of the innermost call."""
    while frame is not None and frame.f_code is not _call_interruptibly.__code__:
        if frame.f_code is _interruptible.__code__:
            return True
        frame = frame.f_back
    return False
