"""Interrupting a call on the main thread whose deadline has passed, as Ctrl-C would.

Reward functions are called on the main thread, since that is what they are written for: `signal.alarm`, sqlite
connections, the current CUDA device and torch's gradient mode all belong to a thread. A signal interrupts Python code,
code that waits, and a runaway regular expression; code inside a C extension that neither returns nor looks for signals
cannot be interrupted.

An interrupt lands in the function or in what it calls, never in the code around it.
"""

import _thread
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "setitimer")

GRACE = 1.0
"""Seconds between interrupts: for the function to clean up in."""

PATIENCE = 3
"""Interrupts that a function may catch; after these it is not left in peace until it has ended."""


class CallTimeout(BaseException):
    """The deadline passed. Not an `Exception`, so that a reward's own `except Exception` cannot swallow it."""


@dataclass
class _Call:
    """A call under way: when it is to be interrupted next (`time.monotonic`), and how often it has been."""

    due: float
    interrupts: int = 0


_call: _Call | None = None
"""The innermost one."""


def call_interruptibly(function: Callable[[], T], seconds: float) -> T:
    """Return `function()`, or raise `CallTimeout` in it after `seconds`; on the main thread alone.

    A function that catches that is interrupted again after a second. One that does so again and again, such as a retry
    loop with a bare `except`, is interrupted wherever it goes on, until it has ended.
    """
    global _call
    outer = _call
    clocks = _Clocks(seconds)
    try:
        _call = _Call(time.monotonic() + seconds)
        clocks.start()
        return _run(function)
    finally:
        _call = outer
        clocks.stop()


def _run(function: Callable[[], T]) -> T:
    """Marks the stack: what is above may be interrupted."""
    return function()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    call, now = _call, time.monotonic()
    if call is None or now < call.due or not _is_the_functions(frame):
        return
    call.interrupts += 1
    if call.interrupts <= PATIENCE:
        call.due = now + GRACE
    else:
        _SIGNAL.again  # noqa: B018 (it has an effect)
    raise CallTimeout


class _Signal(int):
    """A signal that can be sent to this very thread without being looked at before the caller has returned.

    A property that is a C function is no call that Python would handle signals after. So the next one finds the frame
    that catches this one: the body of its `except`, or whatever comes after.
    """

    again = property(_thread.interrupt_main)


_SIGNAL = _Signal(getattr(signal, "SIGVTALRM", signal.SIGINT))


def _is_the_functions(frame: FrameType | None) -> bool:
    """Whether the code that was running when a signal came belongs to the innermost call."""
    while frame is not None and frame.f_code is not call_interruptibly.__code__:
        if frame.f_code is _run.__code__:
            return True
        frame = frame.f_back
    return False


class _Clocks:
    """Two clocks that send the same signal, first after `seconds`, then every second.

    A thread follows the wall clock and reaches code that waits; an interval timer follows CPU time and reaches code
    that computes without ever letting another thread run. The handler stays installed afterwards and then does nothing:
    a last signal under way must not find the default action, which ends the process.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._done = threading.Event()
        self._main = threading.get_ident()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        signal.signal(signal.SIGVTALRM, _on_signal)
        self._watcher = threading.Thread(target=self._watch, name="covey-deadline", daemon=True)
        self._watcher.start()
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, GRACE)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._done.set()
        if self._watcher is not None and self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        wait = self._seconds
        while not self._done.wait(wait):
            signal.pthread_kill(self._main, signal.SIGVTALRM)
            wait = GRACE
