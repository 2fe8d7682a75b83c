"""Waiting that ends: the three ways in which rewards run under a deadline.

`call_with_deadline` runs an ordinary function, `BackgroundLoop` runs coroutines and `ScriptWorker` runs code that can
hang where nothing but killing its process helps. Nothing here knows what a reward is.

An ordinary function stays on the main thread when it is called there, and is interrupted
(`covey.runtime.main_thread_deadline`). Elsewhere it runs on a thread of its own that is left behind when it is late.
"""

import asyncio
import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from covey.runtime.loop_thread import LoopThread
from covey.runtime.main_thread_deadline import CAN_INTERRUPT, call_interruptibly
from covey.runtime.main_thread_deadline import CallTimeout as DeadlineExceeded
from covey.runtime.subprocess_guarded import Child

T = TypeVar("T")

LOOP_GRACE = 2.0
"""Seconds after the deadline at which an event loop that does not answer is given up."""


def call_with_deadline(function: Callable[[], T], seconds: float) -> T:
    """Return `function()`, or raise `DeadlineExceeded` once `seconds` have passed."""
    if seconds <= 0:
        raise DeadlineExceeded
    if CAN_INTERRUPT and threading.current_thread() is threading.main_thread():
        return call_interruptibly(function, seconds)
    return _call_on_thread(function, seconds)


def _call_on_thread(function: Callable[[], T], seconds: float) -> T:
    """Run `function` on a daemon thread that has the caller's settings; leave it if it is late."""
    settings = settings_of_this_thread()
    future: Future[T] = Future()

    def run() -> None:
        try:
            with settings():
                future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="covey-reward", daemon=True).start()
    if not _finished(future, seconds):
        raise DeadlineExceeded
    return future.result()


class CallThread:
    """Runs calls under a deadline on a thread that is kept, which many short calls need: to start one can take longer.

    A thread whose call is late is left behind, and the next call starts another. It has the settings of the thread that
    made this object. Called by one thread at a time.

    Example:
        >>> calls = CallThread()
        >>> calls(lambda: 6 * 7, 10.0)
        42
        >>> calls.close()
    """

    def __init__(self) -> None:
        self._settings = settings_of_this_thread()
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] | None = None

    def __call__(self, function: Callable[[], T], seconds: float) -> T:
        """Return `function()`, or raise `DeadlineExceeded` once `seconds` have passed."""
        if seconds <= 0:
            raise DeadlineExceeded
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queue,), name="covey-reward", daemon=True).start()
        future: Future[T] = Future()
        self._queue.put((function, future))
        if not _finished(future, seconds):
            self.close()
            raise DeadlineExceeded
        return future.result()

    def close(self) -> None:
        """End the thread after what it is at."""
        if self._queue is not None:
            self._queue.put(None)
        self._queue = None

    def _serve(self, calls: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
        with self._settings():
            while (item := calls.get()) is not None:
                function, future = item
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)


def settings_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Torch's gradient mode and CUDA device, which belong to a thread, to be entered on another."""
    import torch

    grad_enabled = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def settings() -> Iterator[None]:
        with torch.set_grad_enabled(grad_enabled), nullcontext() if device is None else torch.cuda.device(device):
            yield

    return settings


def _finished(future: "Future[Any]", seconds: float) -> bool:
    """Whether `future` is done after waiting for at most `seconds`."""
    with suppress(TimeoutError):
        future.exception(timeout=max(seconds, 0.0))
    return future.done()


class BackgroundLoop:
    """An event loop on a daemon thread, so that coroutines run beside whatever the caller does next.

    It lives as long as this object, so clients and locks that reward functions keep between calls stay valid. A loop
    that a coroutine blocks (with `time.sleep`, say) is left behind, and the next call starts another.
    """

    def __init__(self) -> None:
        self._served: LoopThread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Schedule `coroutine` and return at once."""
        if self._served is None:
            self._served = LoopThread(self, "covey-async-rewards")
        return asyncio.run_coroutine_threadsafe(coroutine, self._served.loop)

    def wait(self, future: "Future[T]", seconds: float) -> T:
        """The result of `future`; `DeadlineExceeded`, and a fresh loop next time, if it takes longer."""
        if not _finished(future, seconds):
            if self._served is not None:
                self._served.end()  # as soon as it is no longer blocked
            self._served = None
            raise DeadlineExceeded
        return future.result()


async def await_with_deadline(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return `await coroutine`, or raise `DeadlineExceeded` after `seconds` without waiting for it to stop."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task}, timeout=max(seconds, 0.0))
    if not task.done():
        task.cancel()
        raise DeadlineExceeded
    return task.result()


class WorkerFailed(Exception):
    """A worker process did not answer a request: it was too slow, ran out of memory or crashed."""


class ScriptWorker:
    """A child process that answers JSON lines, started on first use and killed when an answer takes too long.

    It ends with this process, also when that is killed: an expression that takes for ever does not outlive its run.

    The script prints `{"ready": true}` once it can work and then one line for each line it reads. It is run by path,
    not through `multiprocessing`: that would either run the user's training script a second time or fork a process
    that holds CUDA and threads.

    Args:
        script: the file to run with this interpreter and its `sys.path`.
        start_seconds: deadline for becoming ready (imports).
    """

    def __init__(self, script: Path, start_seconds: float = 120.0):
        self.script = script
        self.start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send `request`, return the reply.

        Raises:
            WorkerFailed: no reply within `seconds`, or it died or reported an error. The process was ended and the next
                call starts another.
            RuntimeError: the script does not start.
        """
        with self._lock:
            process = self._running().process
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                return self._reply(seconds)
            except BrokenPipeError as error:
                self.close()
                raise WorkerFailed(f"{self.script.name} died") from error
            except BaseException:  # an answer that arrives later must not be taken for the next one's
                self.close()
                raise

    def close(self) -> None:
        """Kill the process, if this process started one."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def _running(self) -> Child:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        self._owner = os.getpid()
        self._replies = queue.Queue()
        self._process = Child(
            [sys.executable, "-P", str(self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        lines = self._process.process.stdout
        threading.Thread(target=_forward_lines, args=(lines, self._replies), daemon=True).start()
        try:
            self._reply(self.start_seconds)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerFailed):
                raise RuntimeError(f"{self.script.name} did not start: {error}") from error
            raise
        return self._process

    def _reply(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise WorkerFailed(f"no answer within {seconds:g} s") from None
        if line is None:
            raise WorkerFailed("the process died")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply


def _forward_lines(stream: Any, into: "queue.Queue[str | None]") -> None:
    """Copy the lines of a pipe to a queue, then None; a queue can be waited on with a deadline on every platform."""
    for line in stream:
        into.put(line)
    into.put(None)
