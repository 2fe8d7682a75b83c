"""Bookkeeping of requests: results that clients ask for, and a training client's operations in their order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from covey.tinker.errors import Refusal
from covey.tinker.journal import DONE, FAILED, NOT_RUN, Journal, RequestEntry, Result, Sent

KEPT = 300.0  # seconds that a result is kept after it was fetched: the answer may have been lost
PATIENCE = 120.0  # seconds that an operation waits for the one before it


@dataclass(eq=False)
class Promise:
    """A result to come, under the id that the client asks for it by."""

    id: str
    owner: str  # the session
    acknowledgement: dict[str, Any]
    digest: bytes  # of the request
    result: "asyncio.Future[Result]"
    fetched: float | None = None
    cancel: Callable[[], Any] | None = None


class Promises:
    """All promises by id. Each is in the journal before its client learns of it, and so is each result."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._by_id: dict[str, Promise] = {}
        self._swept = time.monotonic()

    def get(self, request_id: str) -> Promise | None:
        return self._by_id.get(request_id)

    def repeated(self, request_id: str, sent: Sent) -> dict[str, Any] | None:
        """The acknowledgement of a request that came before, None for a new one.

        Refusal if another request came under this id.
        """
        promise = self._by_id.get(request_id)
        if promise is None:
            return None
        if promise.digest != sent.digest:
            raise Refusal(
                f"{request_id!r} belongs to another request: two programs use one session. Let each create its own."
            )
        return promise.acknowledgement

    def make(
        self,
        request_id: str,
        owner: str,
        sent: Sent,
        *,
        client: str | None = None,
        number: int = 0,
        work: Callable[[], Awaitable[Result]] | None = None,
        **acknowledged: Any,
    ) -> Promise:
        """A new promise; `work` runs at once. Without it the caller settles the result."""
        self._forget()
        acknowledgement = {"request_id": request_id, **acknowledged}
        self.journal.accept(RequestEntry(request_id, owner, client, number, sent, acknowledgement))
        promise = self._add(request_id, owner, acknowledgement, sent.digest)
        if work is not None:
            task = asyncio.get_running_loop().create_task(self.run(promise, work))
            promise.cancel = task.cancel
        return promise

    def restore(self, entry: RequestEntry) -> None:
        """Add the promise of a request that an earlier server answered."""
        assert entry.result is not None, "it was answered"
        promise = self._add(entry.id, entry.session, entry.acknowledgement, entry.sent.digest)
        promise.result.set_result(entry.result)
        promise.fetched = time.monotonic() if entry.fetched else None

    def _add(self, request_id: str, owner: str, acknowledgement: dict[str, Any], digest: bytes) -> Promise:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._by_id[request_id] = promise = Promise(request_id, owner, acknowledgement, digest, result)
        return promise

    async def run(self, promise: Promise, work: Callable[[], Awaitable[Result]]) -> Exception | None:
        """Run work and settle its promise with the result or the failure; returns the failure, or None."""
        failure: Exception | None = None
        outcome = DONE
        try:
            value = await work()
        except asyncio.CancelledError:
            value, outcome = failed("it was cancelled.", "user"), FAILED
        except Exception as error:
            failure, outcome = error, FAILED
            value = failed(*described(error))
        self.settle(promise, value, outcome)
        return failure

    def settle(self, promise: Promise, value: Result, outcome: str) -> None:
        """Give a promise its result, once."""
        if not promise.result.done():
            self.journal.settle(promise.id, value, outcome)
            promise.result.set_result(value)

    async def fetch(self, request_id: str, seconds: float) -> Result | None:
        """The result, or None if it takes longer; KeyError for an unknown id."""
        promise = self._by_id[request_id]
        done, _ = await asyncio.wait([promise.result], timeout=seconds)
        if not done:
            return None
        if promise.fetched is None:
            promise.fetched = time.monotonic()
            self.journal.fetched(request_id)
        return promise.result.result()

    def discard(self, request_id: str) -> None:
        del self._by_id[request_id]
        self.journal.discard(request_id)

    def drop(self, owner: str) -> None:
        """Forget all promises of a session; those that are not settled are cancelled."""
        for promise in [one for one in self._by_id.values() if one.owner == owner]:
            if promise.cancel is not None:
                promise.cancel()
            del self._by_id[promise.id]

    def _forget(self) -> None:
        """Drop results that were fetched `KEPT` seconds ago; checks only every `KEPT / 4` seconds."""
        now = time.monotonic()
        if now - self._swept < KEPT / 4:
            return
        self._swept = now
        for promise in list(self._by_id.values()):
            if promise.fetched is not None and now - promise.fetched >= KEPT:
                del self._by_id[promise.id]
                self.journal.drop(promise.id)


def failed(text: str, category: str) -> dict[str, Any]:
    return {"error": text, "category": category}


def described(error: Exception) -> tuple[str, str]:
    """Text and category of a failure."""
    if isinstance(error, ValueError | FloatingPointError | OSError):
        return str(error), "user" if not isinstance(error, OSError) else "server"
    return f"{type(error).__name__}: {error}", "server"


@dataclass(eq=False)
class Operation:
    """An operation of a training client."""

    kind: str  # route
    work: Callable[[], Awaitable[Result]]
    promise: Promise


@dataclass(eq=False)
class Sequencer:
    """Runs the operations of a client in the order of their numbers, whichever arrives first."""

    promises: Promises
    # called with the number and the kind of an operation and its failure (None: done)
    on_end: Callable[[int, str, Exception | None], Any] = lambda number, kind, failure: None
    patience: float = PATIENCE
    next: int = 1  # number of the operation to run
    _waiting: dict[int, Operation] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None
    _closed: bool = False

    def add(self, number: int, operation: Operation) -> None:
        """Queue an operation; Refusal for a number that was used."""
        if number < self.next or number in self._waiting:
            raise Refusal(f"seq_id {number} was used already; the next one is {self.next}.")
        self._waiting[number] = operation
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def idle(self) -> bool:
        return not self._waiting and (self._task is None or self._task.done())

    def close(self, *, at_once: bool = False) -> None:
        """Expect no further operations: those that are next in order still run, those that wait for others fail.

        `at_once`: only the one that has begun still runs.
        """
        self._closed = True
        if at_once:
            self._fail_waiting("its server ended")
        self._news.set()

    async def ended(self) -> None:
        """Wait until no operation runs."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._waiting:
            if self.next not in self._waiting:
                await self._wait_for_next()
                continue
            number, operation = self.next, self._waiting.pop(self.next)
            self.next += 1
            failure = await self.promises.run(operation.promise, operation.work)
            self.on_end(number, operation.kind, failure)

    async def _wait_for_next(self) -> None:
        """Wait for the missing operation; fail those behind it if it does not come."""
        deadline = time.monotonic() + self.patience
        while self.next not in self._waiting and not self._closed:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
        if self.next in self._waiting or not self._waiting:
            return
        missing, self.next = self.next, max(self._waiting) + 1
        when = " before its client ended" if self._closed else f" within {self.patience:.0f} seconds"
        self._fail_waiting(f"operation {missing} did not come{when}")

    def _fail_waiting(self, why: str) -> None:
        for number in sorted(self._waiting):
            operation = self._waiting.pop(number)
            failure = Refusal(f"{operation.kind} {number} was not run: {why}.")
            self.promises.settle(operation.promise, failed(str(failure), "user"), NOT_RUN)
            self.on_end(number, operation.kind, failure)
