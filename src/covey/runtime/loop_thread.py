"""Event loops on daemon threads, for work in the background and for coroutines of users."""

import asyncio
import atexit
import concurrent.futures
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from covey.runtime.deadlines import EXIT_SECONDS, CallTimeout, LateCalls, await_future, raise_in, torch_settings
from covey.runtime.user_code import settle

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop
Callbacks = list[Callable[[], Any]]

OWNER_CHECK_SECONDS = 1.0  # between two checks that the owner of a loop still exists
CLEANUP_SECONDS = 1.0  # for cancelled tasks
RESPONSE_SECONDS = 1.0  # a loop that runs no callback for this long is blocked


class LoopThread:
    """An event loop on a daemon thread, which is started with the first coroutine.

    The loop ends with `close`, or soon after the last reference to this object. A coroutine that raises SystemExit or
    stops the loop only ends itself. If one blocks the loop beyond a deadline, its thread is abandoned like that of any
    late call: it gets one exception that asks it to stop, is counted in the `LateCalls` of the function that blocks it
    until it responds again, and ends with the last of its coroutines. The next coroutine starts another thread.

    With `no_grad`, gradients are off in the thread. Its CUDA device is that of the thread that creates this object.
    """

    def __init__(self, name: str, no_grad: bool = False):
        self._name, self._settings = name, torch_settings(no_grad=True) if no_grad else nullcontext
        self._current: _RunningLoop | None = None
        self._lock = threading.Lock()

    def is_current_thread(self) -> bool:
        """True if the caller runs on the loop's thread, and therefore must not wait for it."""
        return self._current is not None and threading.current_thread() is self._current.thread

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        try:
            current = self._ensure_running()
            future = asyncio.run_coroutine_threadsafe(work, current.loop)
        except RuntimeError:
            work.close()
            raise
        current.track(future)
        return future

    def wait(self, future: "Future[T]", seconds: float | None = None) -> T:
        """Result of a future from `start`, for a thread without an event loop; CallTimeout cancels a late one."""
        if not concurrent.futures.wait([future], seconds).done:
            future.cancel()
            current = self._current
            if current and not concurrent.futures.wait([current.ping()], RESPONSE_SECONDS).done:
                self._abandon(current)
            raise CallTimeout
        return future.result()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine and `wait` for its result; Ctrl-C cancels it, too."""
        future = self.start(work)
        try:
            return self.wait(future, seconds)
        except BaseException:
            future.cancel()
            raise

    async def call(self, function: Callable[[], Awaitable[T]], seconds: float, late: LateCalls) -> T:
        """Return `await function()` of a user, or raise UserCodeError; CallTimeout cancels a late one.

        Calls of one iteration of the caller's loop begin in one iteration of this one.
        """
        late.check()
        current = self._ensure_running()
        future: Future[T] = Future()
        task: list[asyncio.Task[None]] = []

        async def work() -> None:
            if future.cancelled():  # given up while another coroutine blocked the loop
                return
            begin_call(late)
            try:
                settle(future, await function())
            except BaseException as error:  # SystemExit would end the loop
                settle(future, error=error)

        current.track(future)
        send_to(current.loop, lambda: task.append(current.loop.create_task(work())))
        try:
            return await await_future(future, seconds)
        except (CallTimeout, asyncio.CancelledError):
            send_to(current.loop, lambda: task[0].cancel())
            try:
                await await_future(current.ping(), RESPONSE_SECONDS)
            except CallTimeout:
                self._abandon(current)
            raise
        finally:
            future.cancel()

    def close(self, seconds: float = 0.0) -> bool:
        """Cancel all coroutines and end the thread; True if it ended within `seconds`."""
        with self._lock:
            current, self._current = self._current, None
        return current is None or current.end(seconds)

    def _ensure_running(self) -> "_RunningLoop":
        with self._lock:
            if self._current is None or not self._current.thread.is_alive():
                self._current = _RunningLoop(self, self._name, self._settings)
            return self._current

    def _abandon(self, blocked: "_RunningLoop") -> None:
        """Abandon a blocked loop; each late call that finds it blocked raises one exception in its thread."""
        with self._lock:
            if self._current is blocked:
                self._current = None
        if not blocked.abandoned:
            blocked.abandoned = True
            for late in blocked.blocking_calls():
                blocked.track(unblocked := blocked.ping())
                late.add(unblocked)
        raise_in(blocked.thread)
        blocked.end_if_unused()


class _RunningLoop:
    """One event loop and its thread, with a weak reference to its owner; `abandoned`, it ends with its last future."""

    def __init__(self, owner: LoopThread, name: str, settings: Callable[[], AbstractContextManager[None]]):
        self.loop = asyncio.new_event_loop()
        self.abandoned = False
        self._futures: set[Future[Any]] = set()
        self._cleanup_seconds = CLEANUP_SECONDS
        self._ending = self._ended = False
        work = partial(self._serve, weakref.ref(owner), settings)
        self.thread = threading.Thread(target=work, name=name, daemon=True)
        _running.add(self)
        self.thread.start()

    def track(self, future: "Future[Any]") -> None:
        """Fail `future` if the loop ends before it does."""
        self._futures.add(future)
        future.add_done_callback(self.end_if_unused)
        if self._ended:
            self._fail_unfinished()

    def ping(self) -> "Future[None]":
        answer: Future[None] = Future()
        try:
            self.loop.call_soon_threadsafe(settle, answer)
        except RuntimeError:  # closed
            answer.set_result(None)
        return answer

    def blocking_calls(self) -> set[LateCalls]:
        """`LateCalls` of the call that runs now, or of all running calls if a task started by one of them runs."""
        running = asyncio.current_task(self.loop)
        if running is not None and running in _calls:
            return {_calls[running]}
        return {late for task, late in list(_calls.items()) if task.get_loop() is self.loop and not task.done()}

    def cancel_tasks(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    def end(self, seconds: float = 0.0) -> bool:
        """End the loop; True if it has ended within `seconds`."""
        self._cleanup_seconds = seconds / 2 or CLEANUP_SECONDS
        self._ending = True
        with suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        if seconds and threading.current_thread() is not self.thread:  # garbage is collected in any thread
            self.thread.join(seconds)
        return not self.thread.is_alive()

    def end_if_unused(self, ended: "Future[Any] | None" = None) -> None:
        self._futures -= {ended}
        if self.abandoned and not self._futures:
            self.end()

    def _serve(self, owner: "weakref.ref[LoopThread]", settings: Callable[[], AbstractContextManager[None]]) -> None:
        def check_owner() -> None:  # a finalizer would run in the middle of whatever code collects garbage
            if owner() is None:
                self.end()
            self.loop.call_later(OWNER_CHECK_SECONDS, check_owner)

        try:
            with suppress(BaseException), settings():  # StopThread may arrive late
                self.loop.call_soon(check_owner)
                while not (self._ending or self.loop.is_closed()):
                    with suppress(BaseException):
                        self.loop.run_forever()
                until = time.monotonic() + self._cleanup_seconds
                while (tasks := asyncio.all_tasks(self.loop)) and (left := until - time.monotonic()) > 0:
                    with suppress(BaseException):  # a late StopThread interrupts the wait, which is repeated
                        for task in tasks:
                            task.cancel()
                        self.loop.run_until_complete(asyncio.wait(tasks, timeout=left))
                with suppress(BaseException):
                    self.loop.run_until_complete(self.loop.shutdown_asyncgens())
                self.loop.close()
        finally:
            self._ended = True
            self._fail_unfinished()

    def _fail_unfinished(self) -> None:
        for future in list(self._futures):
            settle(future, error=RuntimeError("the event loop was closed before this coroutine ended"), wrap=False)


_running: weakref.WeakSet[_RunningLoop] = weakref.WeakSet()
_calls: weakref.WeakKeyDictionary[asyncio.Task[Any], LateCalls] = weakref.WeakKeyDictionary()  # of users' functions


def begin_call(late: LateCalls) -> None:
    """Record which function the current task calls: if it blocks the loop, the loop counts as a late call of it."""
    task = asyncio.current_task()
    assert task is not None, "runs in a coroutine"
    _calls[task] = late


@atexit.register
def _cancel_tasks() -> None:
    """Cancel running coroutines: a thread inside torch when Python (before 3.14) exits aborts the process.

    The loops are kept, since finalizers that close environments may need them.
    """
    loops = [running for running in _running if running.thread.is_alive()]
    for running in loops:
        with suppress(RuntimeError):  # closed
            running.loop.call_soon_threadsafe(running.cancel_tasks)
    concurrent.futures.wait([running.ping() for running in loops], EXIT_SECONDS)


_sent: weakref.WeakKeyDictionary[Loop, weakref.WeakKeyDictionary[Loop, Callbacks]] = weakref.WeakKeyDictionary()


def send_to(receiver: Loop, callback: Callable[[], Any]) -> None:
    """Run `callback()` in another event loop; those of one iteration here run in one iteration there."""
    sender = asyncio.get_running_loop()
    callbacks = _sent.setdefault(sender, weakref.WeakKeyDictionary()).setdefault(receiver, [])
    callbacks.append(callback)
    if len(callbacks) == 1:
        sender.call_soon(_flush, receiver, callbacks)


def _flush(receiver: Loop, callbacks: Callbacks) -> None:
    taken = list(callbacks)
    callbacks.clear()

    def run() -> None:
        for callback in taken:
            callback()

    with suppress(RuntimeError):  # closed
        receiver.call_soon_threadsafe(run)
