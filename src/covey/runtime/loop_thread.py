"""An event loop on a thread of its own for other people's coroutines, whatever these do to it.

Not here: which coroutines, and how long they may take (`covey.runtime.user_code`, `covey.runtime.deadlines`).
"""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

LOOK_SECONDS = 1.0
"""Between two looks at whether anybody still refers to the owner."""

ENDING_SECONDS = 1.0
"""For tasks that are given up to clean up."""


class LoopThread:
    """An event loop on a daemon thread.

    A task that raises SystemExit or stops the loop does not end it for the others. It ends when it is told to, or soon
    after nobody refers to its owner any more; if something blocks it, when that is over.

    Args:
        owner: who it belongs to.
        name: of the thread.

    Attributes:
        loop, thread: as above.
        unwanted: it ends as soon as nobody uses it (`used`).

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> ours = LoopThread(owner, "an-example")
        >>> asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "done"), ours.loop).result()
        'done'
        >>> ours.end()
    """

    def __init__(self, owner: Any, name: str):
        self.loop = asyncio.new_event_loop()
        self.unwanted = False
        self._ending, self._answered = threading.Event(), threading.Event()
        self._users = 0
        self._lock = threading.Lock()
        # The thread refers neither to the owner nor to this object, so that both can be collected as garbage.
        work = partial(_serve, self.loop, self._ending, weakref.ref(owner))
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        self.thread.start()

    def is_blocked(self) -> bool:
        """Whether it has done nothing since this was last asked, which should be a while ago."""
        blocked = self.thread.is_alive() and not self._answered.is_set()
        self._answered = threading.Event()
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._answered.set)
        return blocked

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within this context the loop is needed."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                idle = not self._users
            if idle and self.unwanted:
                self.end()

    def end(self) -> None:
        """Give up what is under way, and let the thread end. Does not wait for that."""
        self._ending.set()
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)


def _serve(loop: asyncio.AbstractEventLoop, ending: threading.Event, owner: "weakref.ref[Any]") -> None:
    """Run a loop until it is to end."""

    def look() -> None:  # and no finalizer, which would run in the middle of whatever code collects garbage
        if owner() is None:
            ending.set()
            loop.stop()
        loop.call_later(LOOK_SECONDS, look)

    with suppress(BaseException):  # such as the one that stops a spinning thread, and came late
        loop.call_soon(look)
        while not (ending.is_set() or loop.is_closed()):
            with suppress(BaseException):
                loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with suppress(BaseException):
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=ENDING_SECONDS))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
