"""Daemon threads that run functions one after another, and that can be stopped while they run Python code."""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from covey.runtime.user_code import settle

T = TypeVar("T")

STOP_INTERVAL = 1.0
"""Seconds between two attempts to stop a thread."""

STOP_ATTEMPTS = 60


class StopThread(BaseException):
    """Raised in a thread that is to stop. Not an `Exception`, so that `except Exception` does not catch it."""


class WorkerThread:
    """Daemon thread that runs functions in the order of their submission, started with the first.

    Args:
        name: of the thread.
        settings: context manager that the thread runs in, such as `torch_settings()`.
        wrap_errors: exceptions reach the future as `UserCodeError`.
    """

    def __init__(
        self, name: str, settings: Callable[[], AbstractContextManager[Any]] = nullcontext, wrap_errors: bool = False
    ):
        self._name, self._settings, self._wrap_errors = name, settings, wrap_errors
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Schedule `function()`.

        Raises:
            RuntimeError: no thread could be started.
        """
        future: Future[T] = Future()
        self._jobs.put((future, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the functions that were submitted."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Raise `StopThread` in the function that runs, and end the thread."""
        self._jobs.put(None)
        if self._thread is not None:
            thread = self._thread
            stop_thread(thread, lambda: self._busy and thread.is_alive())

    def _work(self) -> None:
        with suppress(StopThread), self._settings():  # it may arrive between two functions
            while (job := self._jobs.get()) is not None:
                future, function = job
                if not future.set_running_or_notify_cancel():
                    continue
                self._busy = True
                try:
                    settle(future, function())
                except BaseException as error:  # SystemExit too, which would end the thread in silence
                    settle(future, error=error, wrap=self._wrap_errors)
                self._busy = False
                del job, future, function  # or the thread keeps the last result alive while it waits


def stop_thread(thread: threading.Thread, is_running: Callable[[], bool]) -> None:
    """Raise `StopThread` in the Python code that a thread runs, again every second until `is_running()` is false.

    Code that catches it meets it again, at most `STOP_ATTEMPTS` times. A call into C does not notice before it returns.
    """
    _raise_in(thread)
    _stopper.add(thread, is_running)


class _Stopper:
    """Repeats the request to stop, from a thread that exists while there is a thread to be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[threading.Thread, tuple[int, Callable[[], bool]]] = {}
        self._thread: threading.Thread | None = None

    def add(self, thread: threading.Thread, is_running: Callable[[], bool]) -> None:
        with self._lock:
            self._attempts[thread] = 0, is_running
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="covey-stopping", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            time.sleep(STOP_INTERVAL)
            with self._lock:
                for thread, (attempts, is_running) in list(self._attempts.items()):
                    if attempts < STOP_ATTEMPTS and is_running():
                        self._attempts[thread] = attempts + 1, is_running
                        _raise_in(thread)
                    else:
                        del self._attempts[thread]
                if not self._attempts:
                    self._thread = None
                    return


_stopper = _Stopper()


def _raise_in(thread: threading.Thread) -> None:
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StopThread))
