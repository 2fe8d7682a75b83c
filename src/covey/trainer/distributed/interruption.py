"""Ends what the main thread does for a reason that only another thread can see: that the run has failed elsewhere.

Not here: what the reason is, and how it becomes known (`covey.trainer.distributed.collectives`).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_EVERY = 2.0
"""Seconds between two looks."""
PATIENCE = 3.0
"""Seconds for which the main thread may find out by itself, as it does where it waits for other processes."""
LAST_RESORT = 60.0
"""Seconds after the interruption at which the process is ended, should it be stuck where nothing else reaches it."""

CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "SIGURG")
"""SIGURG is ignored by default and hardly used; Ctrl-C's signal does not reach a process in a shell's background."""


class PeerFailure(KeyboardInterrupt):
    """Raised in the main thread. What lets Ctrl-C through lets this through, too, such as calls of reward functions."""


@contextmanager
def interrupted_when(reason: Callable[[], str | None]) -> Iterator[None]:
    """Within this context the main thread is interrupted once there is a reason; a process that stays is ended.

    Off the main thread, and where there are no such signals, only the end of the process is left.

    Args:
        reason: called on another thread again and again; what to write if the process must be ended, None to go on.

    Raises:
        Interruption: there was a reason; its text is that.
    """
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
