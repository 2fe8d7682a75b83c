"""Interruption of the main thread when another process of the run has failed."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_EVERY = 2.0  # seconds between two checks
PATIENCE = 3.0  # seconds before it: a main thread that waits for other processes notices the failure by itself
LAST_RESORT = 60.0  # seconds from the interruption to the end of a process that does not react to it
CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "SIGURG")
"""SIGURG is ignored by default and rarely used; SIGINT does not reach a background process of a shell."""


class PeerFailure(KeyboardInterrupt):
    """Raised in the main thread; passes wherever Ctrl-C does, as through calls of reward functions."""


@contextmanager
def interrupted_when(reason: Callable[[], str | None]) -> Iterator[None]:
    """Interrupt the main thread within this context once there is a reason; end a process that does not react."""
    left = threading.Event()
    caller = threading.get_ident() if CAN_INTERRUPT and threading.current_thread() is threading.main_thread() else None
    found: list[str] = []

    def watch() -> None:
        while not left.wait(LOOK_EVERY):
            if (text := reason()) is None:
                continue
            found.append(text)
            if left.wait(PATIENCE):
                return
            if caller is not None:
                signal.pthread_kill(caller, signal.SIGURG)
            if not left.wait(LAST_RESORT):
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
            return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if found and not left.is_set():
            raise PeerFailure(found[0])

    previous = signal.signal(signal.SIGURG, interrupt) if caller is not None else None
    watcher = threading.Thread(target=watch, name="covey-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()
        if caller is not None:
            signal.signal(signal.SIGURG, previous)
