"""Stopping threads that run other people's Python code and will not end by themselves.

A thread is told to stop by an exception in whatever Python code it runs. A call into C that does not return is not
reached: such a thread is left behind, and stops when the call returns. Code that catches the exception, as a bare
`except` does, is told again every second, for a while.
"""

import ctypes
import threading
import time
from collections.abc import Callable

SECONDS = 1.0
"""Between two times that a thread is told."""

TIMES = 60
"""How often a thread is told; one that goes on after that is left alone."""


class Stop(BaseException):
    """Raised within a thread that is to stop. Not an `Exception`, so that `except Exception` cannot swallow it."""


class _Stopper:
    """Tells threads again, from a thread of its own that is there while there is one to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[threading.Thread, tuple[int, Callable[[], bool]]] = {}
        self._thread: threading.Thread | None = None

    def insist(self, thread: threading.Thread, goes_on: Callable[[], bool]) -> None:
        with self._lock:
            self._told[thread] = 0, goes_on
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="covey-stopping", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            time.sleep(SECONDS)
            with self._lock:
                for thread, (times, goes_on) in list(self._told.items()):
                    if times < TIMES and goes_on():
                        self._told[thread] = times + 1, goes_on
                        _tell(thread)
                    else:
                        del self._told[thread]
                if not self._told:
                    self._thread = None
                    return


_stopper = _Stopper()


def stop_thread(thread: threading.Thread, goes_on: Callable[[], bool] | None = None) -> None:
    """Tell a thread to stop what it does.

    Args:
        thread: which.
        goes_on: whether it has to be told again; by default, whether it is still there.
    """
    _tell(thread)
    _stopper.insist(thread, goes_on or thread.is_alive)


def _tell(thread: threading.Thread) -> None:
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
