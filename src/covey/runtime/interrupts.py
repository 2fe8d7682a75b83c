"""Ctrl-C and SIGTERM: an immediate answer, whatever the main thread is doing, and an end without a traceback.

Python runs signal handlers on the main thread, and only when a call into C has returned, which may take a minute in a
backward pass or while a library is imported. Therefore a second thread reads each signal from a pipe, prints what will
happen, keeps the deadline and, as a last resort, ends the process.
"""

import atexit
import functools
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

REPEAT_SECONDS = 5.0  # between two interrupts of a main thread that caught the first one and continues
HANDLER_SECONDS = 0.3  # that Python's handler has to interrupt the main thread before another signal is sent
CLEANUP_SECONDS = 1.0  # for tasks that an interrupt has cancelled
LAST_RESORT = 5.0  # seconds from the last request to the end of a process whose main thread does not react
FORWARD_SECONDS = 2.0  # in which a launcher forwards a Ctrl-C that its processes have already received
ANSWERED = "covey_answered"
"""Attribute of a KeyboardInterrupt whose message has already been printed."""

_END, _WAKE = 0, 255  # no signals have these numbers: for the thread that reads them


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread for a signal that `Interrupts` handles."""


class Interrupts:
    """Handles SIGINT and SIGTERM, if no other code does; the first one ends the work, a second one the process.

    Subclasses define in `on_request` what a request does, and in `is_protected` when the main thread must not be
    interrupted.
    """

    def __init__(self, farewell: Callable[[], str] = lambda: "covey: stopped"):
        self.farewell = farewell  # the last line that is printed
        self.say: Callable[[str], None] = say
        self.signal: int | None = None  # the signal by which this process was asked to end
        self._reset()

    def _reset(self) -> None:
        self.signal, self.count = None, 0
        self.cut = False  # the main thread must stop its work
        self.deadline = self._force_at = math.inf  # by `time.monotonic`
        self._repeat_at = -math.inf  # when the main thread is interrupted again
        self.leaving = False  # the main thread is cleaning up, and only further requests interrupt it
        self._left = False  # the main thread has left the context
        self._own = 0  # signals that this object has sent itself
        self._asked_at = 0.0
        self._lock = threading.RLock()
        self._main, self._pid = threading.get_ident(), os.getpid()
        self._reads = self._writes = -1  # ends of the pipe
        self._numbers: list[int] = []

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def on_request(self) -> str:
        """Handle the `count`-th request; returns the line to print. Called on any thread."""
        self.cut = True
        if self.count > 1:
            self.end_now()
        return "covey: stopping"

    def on_deadline(self) -> str:
        """Handle the end of the time that a request has left; returns the line to print."""
        self.cut = True
        return "covey: the time is over; stopping now"

    def is_protected(self) -> bool:
        """True while the main thread must not be interrupted."""
        return False

    def end_now(self, seconds: float = 0.0) -> None:
        """End the process after `seconds`, unless its main thread has left the context by then."""
        self._force_at = min(self._force_at, time.monotonic() + seconds)

    # ---- the context -------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, enabled: bool = True) -> Iterator[None]:
        """Context in which signals are handled; at its end raises KeyboardInterrupt or SystemExit if one was received.

        An error of work that was interrupted is dropped, because the interrupt caused it.
        """
        self._reset()
        main = enabled and threading.current_thread() is threading.main_thread()
        self._numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if main and _is_free(number)]
        if not self._numbers:
            yield
            return
        _show_no_traceback()
        previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        watcher, outer = self._start()
        try:
            yield
        except BaseException:
            if not self.cut:
                raise
        finally:
            self._left = True
            if watcher is not None:
                self._end(watcher, outer)
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.signal is not None:
            if line := self.farewell():
                self.say(line)
            raise SystemExit(128 + signal.SIGTERM) if self.signal == signal.SIGTERM else answered(line)

    def _start(self) -> tuple[threading.Thread | None, int]:
        """Start the thread that reads signals; none where another program reads them already, as asyncio may."""
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)
        outer = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if outer != -1 and outer not in _pipes:
            signal.set_wakeup_fd(outer)
            os.close(reads)
            os.close(writes)
            return None, outer
        self._reads, self._writes = reads, writes
        _pipes.add(writes)
        watcher = threading.Thread(target=self._watch, name="covey-signals", daemon=True)
        watcher.start()
        return watcher, outer

    def _end(self, watcher: threading.Thread, outer: int) -> None:
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        os.write(self._writes, bytes([_END]))
        watcher.join()
        _pipes.discard(self._writes)
        for end in (self._reads, self._writes):
            os.close(end)
        self._reads = self._writes = -1

    def _watch(self) -> None:
        while True:
            select.select([self._reads], [], [], None if self.signal is None else 0.1)
            with self._lock:
                if not self._take():
                    return
                self._keep_time()

    def _take(self) -> bool:
        """Handle the signals in the pipe; False at its end."""
        with suppress(BlockingIOError):
            for number in os.read(self._reads, 64):
                if number == _END:
                    return False
                if number in self._numbers:
                    self._request(number)
        return True

    def _request(self, number: int) -> None:
        """Count a signal; a repeated SIGTERM, as schedulers and launchers send it, is one request."""
        if self._own and number == self._numbers[0]:
            self._own -= 1
            return
        now = time.monotonic()
        forwarded = "LOCAL_RANK" in os.environ and now < self._asked_at + FORWARD_SECONDS
        if self.signal is not None and (number == signal.SIGTERM or forwarded):
            return
        self.signal, self._asked_at = self.signal or number, now
        self.count += 1
        self.say(self.on_request())
        self._repeat_at = now + HANDLER_SECONDS

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now >= self.deadline:
            self.deadline, self._repeat_at = math.inf, now
            if not self.cut:
                self.say(self.on_deadline())
        if now >= self._force_at:
            if line := self.farewell():
                self.say(line)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(128 + (self.signal or signal.SIGTERM))
        if self.cut and not (self.leaving or self._left or self.is_protected()) and now >= self._repeat_at:
            self._repeat_at = now + REPEAT_SECONDS
            self._own += 1
            signal.pthread_kill(self._main, self._numbers[0])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's signal handler, on the main thread. The other thread may or may not have handled the signal."""
        if os.getpid() != self._pid:  # a forked worker
            raise Interrupted
        if self._left:
            return
        if self._reads == -1:
            self._request(number)
        elif self._lock.acquire(timeout=0.05):  # it may wait for a display that this thread is writing to
            try:
                self._take()
                os.write(self._writes, bytes([_WAKE]))  # it keeps the time from now on
            finally:
                self._lock.release()
        if self.cut and not self.is_protected():
            self._repeat_at = time.monotonic() + REPEAT_SECONDS
            raise Interrupted


def interruptible(function: F) -> F:
    """Decorator of a function that Ctrl-C ends with an immediate answer and without a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with Interrupts().listening(enabled=not is_taken()):
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but an interrupt, which may end any task, is raised once and not logged."""
    import asyncio  # not for each command

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        try:
            return runner.run(work)
        except KeyboardInterrupt:
            loop.set_exception_handler(lambda loop, context: None)
            for _ in range(3):  # a task that is cancelled may pass on the interrupt of another one
                with suppress(KeyboardInterrupt):
                    for task in (tasks := asyncio.all_tasks(loop)):
                        task.cancel()
                    if tasks:
                        loop.run_until_complete(asyncio.wait(tasks, timeout=CLEANUP_SECONDS))
                    break
            raise


def is_taken() -> bool:
    """True within a context of `Interrupts` that listens."""
    return isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Interrupts)


def say(line: str) -> None:
    """Write a line to stderr from a thread or signal handler, which may have interrupted a `print`."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def answered(line: str) -> KeyboardInterrupt:
    """A KeyboardInterrupt that is shown as this line only, which has already been printed."""
    error = KeyboardInterrupt(line)
    setattr(error, ANSWERED, True)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {line}"]  # type: ignore[attr-defined] # of IPython
    return error


def _is_free(number: int) -> bool:
    handler = signal.getsignal(number)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(
        getattr(handler, "__self__", None), Interrupts
    )


_pipes: set[int] = set()  # of objects that listen, the outer ones too


def _show_no_traceback() -> None:
    """Hide tracebacks of interrupts that have been answered, also of interrupts raised in finalizers."""
    if getattr(sys.excepthook, ANSWERED, False):
        return
    shows, warns = sys.excepthook, sys.unraisablehook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        if not getattr(error, ANSWERED, False):
            shows(kind, error, trace)
            return
        # As Python does, whose own note of an interrupt is lost where anything calls `exec` meanwhile.
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    def unraisablehook(what: Any) -> None:
        if not isinstance(what.exc_value, Interrupted):
            warns(what)

    setattr(excepthook, ANSWERED, True)
    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook


def _forget_pipes() -> None:
    """Called in a forked process, so that its signals are not read as requests to its parent."""
    if _pipes:
        signal.set_wakeup_fd(-1)
        _pipes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pipes)
