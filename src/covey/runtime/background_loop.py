"""An event loop in a thread of its own: whatever is bound to a loop (connections, semaphores) lives in it.

Callers come from any thread and from any other loop. Not here: what runs in it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds for what is cancelled to come to its end."""


class BackgroundLoop:
    """Runs coroutines until `close`, or until the process ends.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Wait for `work` from a thread without a loop; Ctrl-C and the deadline cancel it.

        Args:
            work: runs in the background loop.
            seconds: to wait at most; the last resort, for work that has deadlines of its own.

        Raises:
            TimeoutError: it took longer.
        """
        future = self._submit(work)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` from another loop; who is cancelled there cancels it here."""
        return await asyncio.wrap_future(self._submit(work))

    def close(self) -> None:
        """Cancel what still runs and end the thread; nothing happens the second time."""
        if self._loop.is_closed():
            return
        if self.inside:  # garbage is collected in any thread
            self._ending = self._loop.create_task(_cancel_others())
            return
        self._submit(_cancel_others())
        self._thread.join(2 * PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def inside(self) -> bool:
        """Whether the caller runs in this very thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        """Whether nothing can be run any more."""
        return self._loop.is_closed()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=PATIENCE)
    asyncio.get_running_loop().stop()
