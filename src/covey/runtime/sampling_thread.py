"""A thread that samples while the main thread trains: one event loop, and waits that end.

Coroutines go in, futures come out. Not here: what is sampled, and when (`covey.trainer.async_rollouts`). Nothing that
runs here may call a collective: processes would meet in another order than their main threads do.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LOOK = 1.0
"""Seconds between two looks at whether the thread that is waited for still lives."""


class SamplingThread:
    """An event loop on a daemon thread.

    An engine meets one loop as long as the thread lives, so that its connections serve every generation. Gradients are
    off there.

    Example:
        >>> async def answer():
        ...     return 42
        >>> thread = SamplingThread()
        >>> thread.run(answer())
        42
        >>> thread.close()
        True
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._serve, args=(device,), name="covey-sampling", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine beside whatever the caller does next."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self.wait(self.start(work))

    def wait(self, future: "Future[T]") -> T:
        """The result of what was started; what it raised is raised here.

        Raises:
            RuntimeError: the thread has ended, so there will be no result.
        """
        while True:
            with suppress(TimeoutError):
                if not future.done():
                    future.exception(timeout=LOOK)
            if future.done():
                return future.result()
            if not self._thread.is_alive():
                raise RuntimeError("the thread that samples has ended, and what it was working on with it.")

    def close(self, seconds: float = 5.0) -> bool:
        """End what is under way and the thread; returns whether it ended in time. A thread that did not dies last."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(seconds / 2), self._loop)
            self._thread.join(seconds)
        return not self._thread.is_alive()

    async def _end(self, seconds: float) -> None:
        """Cancel every other task, let them clean up for a while, and stop the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=seconds)
        self._loop.call_soon(self._loop.stop)

    def _serve(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        asyncio.set_event_loop(self._loop)
        try:
            with torch.no_grad():  # as where the main thread samples; the mode belongs to a thread
                self._loop.run_forever()
        finally:
            with suppress(RuntimeError):  # a task that would not end is still there
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()
