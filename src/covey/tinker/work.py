"""The thread that computes: it samples for all clients in one batch, and trains between decoding steps.

Snapshots are copies, and adapters are added to another copy of the model's modules than the engine's, so a training
operation changes nothing that is being sampled from.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from covey.core.engine import SampleRequest
from covey.core.records import Completion
from covey.engines.native.adapter_engine import AdapterEngine, LowRank

T = TypeVar("T")

QUIET = 0.02  # seconds without another request after which waiting ones are admitted: equal prompts come one by one
MOST_QUIET = 0.1  # seconds that a request waits for others at most
LINGER = 0.3  # seconds that the engine stays awake without requests: the next turn of an episode comes soon
SHARE = 2.0  # most seconds of decoding that follow on a training operation before the next one


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """Weights to sample from, which never change."""

    name: str
    low_rank: LowRank


@dataclass(frozen=True, eq=False)
class _Waiting:
    snapshot: WeightSnapshot | None  # None: the model alone
    request: SampleRequest
    result: Future[list[Completion]]


class Worker:
    """Runs jobs one at a time, and samples between them; other threads ask for both."""

    def __init__(self, make_engine: Callable[..., AdapterEngine]):
        """`make_engine` takes the function that gives the adapters of the next window, as `adapters`."""
        self._loaded: dict[str, WeightSnapshot] = {}
        self._engine = make_engine(
            adapters=lambda: {name: snapshot.low_rank for name, snapshot in self._loaded.items()}
        )
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._first = self._last = 0.0  # times of arrival of the first and the last request that waits
        self._closed = False
        self._threads = torch.get_num_threads()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="covey-tinker", daemon=True)
        self._thread.start()
        self._started.wait()

    def run(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job on the thread, between decoding steps."""
        result: Future[T] = Future()
        self._jobs.append((job, result))
        self._wake()
        return result

    def sample(self, snapshot: WeightSnapshot | None, request: SampleRequest) -> "Future[list[Completion]]":
        """Sample from a snapshot; cancelling the future frees its place."""
        result: Future[list[Completion]] = Future()
        named = replace(request, adapter=None if snapshot is None else snapshot.name)
        self._last = time.monotonic()
        if not self._waiting:
            self._first = self._last
        self._waiting.append(_Waiting(snapshot, named, result))
        self._wake()
        return result

    @property
    def busy(self) -> int:
        """Requests and jobs that wait."""
        return len(self._waiting) + len(self._jobs)

    def drop_waiting(self) -> None:
        """Cancel jobs that have not begun, and requests of samples."""
        for _, result in list(self._jobs):
            result.cancel()
        for waiting in list(self._waiting):
            waiting.result.cancel()

    def close(self) -> None:
        """End the thread after what it does now; all that wait are cancelled."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        asyncio.run(self._work())
        for _, result in self._jobs:
            result.cancel()
        for waiting in self._waiting:
            waiting.result.cancel()

    async def _work(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        while not self._closed:
            if self._has_settled():
                await self._window()
            elif self._jobs:
                self._do()
            else:
                await self._wait(QUIET / 4 if self._waiting else None)

    async def _wait(self, seconds: float | None) -> None:
        """Wait for a request or a job."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()

    def _has_settled(self) -> bool:
        now = time.monotonic()
        return bool(self._waiting) and (now - self._last >= QUIET or now - self._first >= MOST_QUIET)

    def _do(self) -> None:
        job, result = self._jobs.popleft()
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(job())
        except Exception as error:
            result.set_exception(error)

    async def _window(self) -> None:
        """Sample from the snapshots that are asked for now, until a request names another one or no request comes."""
        self._loaded = {one.snapshot.name: one.snapshot for one in self._waiting if one.snapshot is not None}
        running: dict[asyncio.Task[Any], _Waiting] = {}
        try:
            with self._engine.awake():
                await self._sample_while_awake(running)
        except Exception as error:  # of waking: all that wait for it learn of it
            while self._waiting:
                _settle(self._waiting.popleft().result, error=error)
        finally:
            for task in running:
                task.cancel()
            self._loaded = {}

    async def _sample_while_awake(self, running: "dict[asyncio.Task[Any], _Waiting]") -> None:
        next_job = idle_since = time.monotonic()
        while not self._closed:
            if self._has_settled():
                while self._waiting and self._is_loaded(self._waiting[0]):
                    one = self._waiting.popleft()
                    if not one.result.cancelled():
                        running[asyncio.create_task(self._engine.generate(one.request))] = one
                self._first = time.monotonic()
            for task in [task for task, one in running.items() if task.done() or one.result.cancelled()]:
                _finish(task, running.pop(task).result)
            now = time.monotonic()
            if self._jobs and (now >= next_job or not running):
                self._do()
                done = time.monotonic()
                next_job = done + min(SHARE, done - now)
            if running:
                idle_since = time.monotonic()
                await asyncio.sleep(0)  # a decoding step
            elif self._is_over(idle_since):
                return
            elif not self._jobs:
                await self._wait(QUIET / 4 if self._waiting else LINGER)

    def _is_over(self, idle_since: float) -> bool:
        """True if nothing is left to sample in this window."""
        if self._waiting:
            return not self._is_loaded(self._waiting[0])
        return time.monotonic() - idle_since >= LINGER

    def _is_loaded(self, one: _Waiting) -> bool:
        return one.snapshot is None or one.snapshot.name in self._loaded


def _finish(task: "asyncio.Task[Any]", result: "Future[Any]") -> None:
    if not task.done():
        task.cancel()
    elif task.cancelled():
        result.cancel()
    elif (error := task.exception()) is not None:
        _settle(result, error=error)
    else:
        _settle(result, task.result())


def _settle(result: "Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    if result.set_running_or_notify_cancel():
        result.set_result(value) if error is None else result.set_exception(error)
