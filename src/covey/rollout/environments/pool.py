"""Pool of environments: one per running rollout, reset and reused; calls of their methods have deadlines.

An environment that hung or failed is discarded. Each is closed exactly once, at the latest when the process ends.
"""

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from covey.rollout.environments.interface import EnvironmentFailed
from covey.runtime.calling_thread import call_here, calls_wait_here, is_threaded
from covey.runtime.deadlines import (
    CallTimeout,
    LateCalls,
    StillRunning,
    WorkerThread,
    await_future,
    call_with_deadline,
    can_interrupt_here,
)
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import UserCodeError, call_and_wait, format_error, is_async, place_of, warn

T = TypeVar("T")

CLOSING_GRACE = 1.0  # seconds beyond the deadline of `close` that the pool waits for all of them


class EnvironmentWarning(UserWarning):
    """Warning of a problem with an environment; the run continues."""


class Lease:
    """An environment that is lent to a rollout; its methods are called one at a time.

    Ordinary methods run on the thread that waits for the rollouts, if there is one (`waits_here`), else on a thread of
    the environment's own. A deadline includes the wait for earlier calls.
    """

    def __init__(
        self, loop: LoopThread, seconds: float, late: LateCalls, environment: Any = None, waits_here: bool = False
    ):
        self.loop, self.seconds, self.late, self.waits_here = loop, seconds, late, waits_here
        self.environment = environment  # None until it has been made
        self.lost: str | None = None  # reason why the environment can no longer be used, or None
        self.thread = WorkerThread("covey-environment", wrap_errors=True)
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @property
    def kind(self) -> str:
        return type(self.environment).__name__

    async def call(self, method: str, check: Callable[[Any, str], T], /, *args: Any, **kwargs: Any) -> T:
        """Call a method and return `check(value, name)` of its value; EnvironmentFailed if either fails."""
        return await self.run(f"{self.kind}.{method}", getattr(self.environment, method), check, *args, **kwargs)

    async def run(
        self, name: str, function: Callable[..., Any], check: Callable[[Any, str], T], /, *args: Any, **kwargs: Any
    ) -> T:
        """Call a function and check its value, both under one deadline: a check may run code of the value."""
        try:
            return await self.raw_call(name, function, check, *args, **kwargs)
        except StillRunning as refused:
            raise EnvironmentFailed(f"{name}: {refused}") from None
        except CallTimeout:
            raise EnvironmentFailed(f"{name} took longer than tool_timeout={self.seconds:g} s") from None
        except UserCodeError as raised:
            if isinstance(raised.error, EnvironmentFailed):
                raise raised.error from None
            raise EnvironmentFailed(f"{name} raised {raised}") from raised.error

    async def raw_call(
        self, name: str, function: Callable[..., Any], check: Callable[[Any, str], T], /, *args: Any, **kwargs: Any
    ) -> T:
        """Call a function and check its value, raising the original exceptions, for callers that distinguish them."""
        if self.lost is not None:
            raise EnvironmentFailed(self.lost)
        if is_async(function):
            return await self._on_loop(name, partial(function, *args, **kwargs), check)
        if self.waits_here and calls_wait_here():
            return await self._here(name, lambda: check(call_and_wait(function, *args, **kwargs), name))
        until = time.monotonic() + self.seconds
        future = self.thread.submit(lambda: check(call_and_wait(function, *args, **kwargs), name))
        try:
            return await await_future(future, self.seconds)
        except (CallTimeout, asyncio.CancelledError):
            if not (future.cancel() or future.done()):  # it has begun
                self.lose(name)
                self.late.add(future, until - time.monotonic())
                self.thread.stop()
            raise

    def lose(self, name: str) -> None:
        """Mark the environment as unusable, because a call was abandoned and its state is unknown."""
        self.lost = self.lost or f"{name} was given up after {self.seconds:g} s or less, and may still be at work"

    async def _here(self, name: str, function: Callable[[], T]) -> T:
        begun: list[bool] = []
        try:
            return await call_here(function, self.seconds, self.late, on_begin=lambda: begun.append(True))
        except (CallTimeout, asyncio.CancelledError):
            if begun:
                self.lose(name)
            raise

    async def _on_loop(self, name: str, function: Callable[[], Awaitable[Any]], check: Callable[[Any, str], T]) -> T:
        begun = False

        async def take_turn() -> T:
            nonlocal begun
            loop = asyncio.get_running_loop()
            if self._turn is None or self._turn[0] is not loop:  # the loop is replaced where something blocks it
                self._turn = loop, asyncio.Lock()
            async with self._turn[1]:
                begun = True
                return check(await function(), name)

        try:
            return await self.loop.call(take_turn, self.seconds, self.late)
        except (CallTimeout, asyncio.CancelledError):
            if begun:
                self.lose(name)
            raise


def unchanged(value: T, name: str) -> T:
    return value


def close_environment(environment: Any) -> str | None:
    """Close an environment on this thread; the message of the exception that it raised, if any."""
    close = getattr(environment, "close", None)
    return failure_of(partial(call_and_wait, close)) if callable(close) else None


def failure_of(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except Exception as error:
        return format_error(error) + place_of(error)
    return None


class EnvironmentPool:
    """Makes, lends and closes environments."""

    def __init__(self, factory: Callable[[], Any], seconds: float, limit: int | None = None):
        self.factory, self.seconds, self.limit = factory, seconds, limit
        self.loop = LoopThread("covey-async-tools")
        self._environments = _Environments(self.loop, seconds)
        self._making = 0
        self._waiting: deque[Future[None]] = deque()
        self._at_end = weakref.finalize(self, self._environments.close)  # which does not keep the pool alive

    async def acquire(self) -> Lease:
        """An environment that no other rollout uses: an idle one, or a new one."""
        known = self._environments
        while True:
            with known.lock:
                if known.idle:
                    lease = known.idle.pop()
                    known.leased[id(lease.environment)] = lease
                    return lease
                under_way = len(known.leased) + self._making
                may_make = (self.limit is None or under_way < self.limit) and not (known.late.is_full and under_way)
                turn: Future[None] = Future()
                if may_make:
                    self._making += 1
                else:
                    self._waiting.append(turn)
            if may_make:
                return await self._make()
            try:
                await asyncio.wrap_future(turn)
            except asyncio.CancelledError:
                self._wake_next()  # the turn passes on, should it have come
                raise

    async def _make(self) -> Lease:
        known = self._environments
        waits_here = calls_wait_here() and not is_threaded(self.factory)
        lease = Lease(self.loop, self.seconds, known.late, waits_here=waits_here)
        try:
            self._environments.late.check()
            environment = lease.environment = await lease.run("environment_factory", self.factory, unchanged)
            with known.lock:
                if id(environment) in known.leased or any(one.environment is environment for one in known.idle):
                    raise EnvironmentFailed(
                        f"environment_factory returned the same {type(environment).__name__} twice; make a new object"
                        " in every call, since concurrent rollouts need separate environments"
                    )
                known.leased[id(environment)] = lease
            return lease
        except BaseException as error:
            lease.thread.close()
            self._wake_next()
            if isinstance(error, StillRunning):
                raise EnvironmentFailed(f"no environment was made: {error}") from None
            raise
        finally:
            with known.lock:
                self._making -= 1

    def release(self, environment: Any, usable: bool = True) -> None:
        """Take an environment back for another rollout; one that is not `usable` is closed, without waiting.

        If its methods run on the thread that waits for the rollouts, it is closed there, by `close_lost`.
        """
        known = self._environments
        with known.lock:
            lease = known.leased.pop(id(environment), None)
            usable = usable and lease is not None and lease.lost is None
            if lease is not None and usable:
                known.idle.append(lease)
        if lease is not None and not usable and lease.waits_here:
            known.lost.append(lease)
        elif lease is not None and not usable:
            closing = known.loop.start(known.close_one(lease))
            known.closing.add(closing)
            closing.add_done_callback(known.closing.discard)
        self._wake_next()

    def close_lost(self) -> None:
        """Close unusable environments whose methods run on this thread."""
        known = self._environments
        with known.lock:
            lost, known.lost = known.lost, []
        known.close_here(lost)

    def close(self) -> None:
        """Close all environments, waiting until the deadline. `acquire` may be called afterwards and makes new ones."""
        self._environments.close()

    def _wake_next(self) -> None:
        """Let the rollout that has waited longest try again to get an environment."""
        with self._environments.lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():  # else it was cancelled
                    turn.set_result(None)
                    return


class _Environments:
    """The environments of a pool, and the errors of closing them."""

    def __init__(self, loop: LoopThread, seconds: float) -> None:
        self.loop, self.seconds = loop, seconds
        self.closing: set[Future[None]] = set()
        self.lock = threading.RLock()  # a finalizer may run while it is held
        self.idle: list[Lease] = []
        self.lost: list[Lease] = []  # in an unknown state, to be closed by the thread that waits for rollouts
        self.leased: dict[int, Lease] = {}
        self.errors: list[str] = []
        self.late = LateCalls("an environment")  # one that hangs takes its thread with it, and another is made

    def close(self) -> None:
        with self.lock:
            leases = [*self.idle, *self.leased.values(), *self.lost]
            self.idle.clear()
            self.leased.clear()
            self.lost = []
        if can_interrupt_here():
            self.close_here([lease for lease in leases if lease.waits_here])
            leases = [lease for lease in leases if not lease.waits_here]
        waiting = list(self.closing)
        try:
            waiting += [self.loop.start(self.close_one(lease)) for lease in leases]
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self.close_here(leases)
        if self.loop.is_current_thread():  # collected as garbage on the loop's own thread: waiting would be a deadlock
            return
        late = wait(waiting, timeout=self.seconds + CLOSING_GRACE).not_done
        self.errors += ["it took too long"] * len(late)
        self.loop.close()
        if self.errors:
            count = "an environment" if len(self.errors) == 1 else f"{len(self.errors)} environments"
            message = f"{count} could not be closed: {self.errors[0]}."
            self.errors.clear()
            warn(message, EnvironmentWarning)

    def close_here(self, leases: Sequence[Lease]) -> None:
        """Close environments on this thread, all by one deadline; without one while the interpreter shuts down."""
        until = time.monotonic() + self.seconds
        for lease in leases:
            close = partial(call_and_wait, getattr(lease.environment, "close", lambda: None))
            try:
                raised = call_with_deadline(partial(failure_of, close), until - time.monotonic(), self.late)
            except CallTimeout:
                self.errors.append(f"{lease.kind}.close took longer than tool_timeout={self.seconds:g} s")
                raised = None
            except RuntimeError:  # no thread can be started, which a deadline needs
                raised = failure_of(close)
            if raised is not None:
                self.errors.append(f"{lease.kind}.close raised {raised}")
            lease.thread.close()

    async def close_one(self, lease: Lease) -> None:
        close = getattr(lease.environment, "close", None)
        try:
            if callable(close):
                # The thread of one that was abandoned may never come back.
                closing = lease if lease.lost is None else Lease(self.loop, self.seconds, self.late, lease.environment)
                await closing.call("close", unchanged)
                closing.thread.close()
        except Exception as error:
            self.errors.append(
                str(error) if isinstance(error, EnvironmentFailed) else format_error(error) + place_of(error)
            )
        finally:
            lease.thread.close()
