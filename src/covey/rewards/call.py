"""One call of a reward function on a batch, under a deadline, with failures isolated to their samples.

If the call on the whole batch raises, every sample is tried alone, under the same deadline. A `RewardStream` calls
functions as rollouts end, while others are still sampled.
"""

import asyncio
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from covey.core.records import Rollout, StepRewards
from covey.rewards.contract import MissingArgument, RewardError
from covey.rewards.functions import FailedReward, FunctionReward, IsolatedReward, Log, RewardBatch, Row, Values
from covey.rewards.models import ModelReward
from covey.rewards.steps import total
from covey.runtime import deadlines
from covey.runtime.deadlines import LateCalls
from covey.runtime.loop_thread import LoopThread, begin_call
from covey.runtime.user_code import format_error, place_of

LOOP_GRACE = 1.0  # seconds after the deadline of an async function; then its event loop counts as blocked


@dataclass(frozen=True)
class CallResult:
    """Rewards of a batch by one function, one per sample."""

    values: list[float]  # NaN where it abstained, `FailedReward` where it failed or was late; the sum of steps
    steps: list[StepRewards | None]  # as the function returned them; None where it returned a number
    log: Log  # of the calls that succeeded
    seconds: float = 0.0  # wall time
    whole: FailedReward | None = None  # failure of the call on the whole batch, if no single sample was scored either

    @classmethod
    def of(cls, returned: Values, log: Log) -> "CallResult":
        values: list[float] = []
        steps: list[StepRewards | None] = []
        for item in returned:
            value = total(item) if isinstance(item, list) else item
            if value is not None and math.isnan(value) and not isinstance(value, FailedReward):
                value = FailedReward(None, "it returned NaN; None is how to abstain")
            values.append(math.nan if value is None else value)
            steps.append(item if isinstance(item, list) else None)
        return cls(values, steps, log)

    @classmethod
    def failed(cls, size: int, error: BaseException, seconds: float = 0.0) -> "CallResult":
        """Result of a call that raised; formats the error, which may run code of the user."""
        ours = isinstance(error, RewardError | deadlines.CallTimeout)
        failure = FailedReward(error, str(error) if ours else format_error(error) + place_of(error))
        return cls([failure] * size, [None] * size, Log(size), seconds)

    @classmethod
    def timed_out(cls, size: int, timeout: float) -> "CallResult":
        return cls.failed(size, deadlines.CallTimeout(f"no answer within {timeout:g} s"), timeout)

    @classmethod
    def joined(cls, parts: "list[CallResult]") -> "CallResult":
        return cls(
            values=[value for part in parts for value in part.values],
            steps=[steps for part in parts for steps in part.steps],
            log=Log.joined([part.log for part in parts]),
            seconds=sum(part.seconds for part in parts),
            whole=next((part.whole for part in parts if part.failures), None),
        )

    @property
    def failures(self) -> dict[int, FailedReward]:
        """Samples on which the function raised, was late, or returned NaN or something that is not a reward."""
        return {index: value for index, value in enumerate(self.values) if isinstance(value, FailedReward)}

    @property
    def first_failure(self) -> FailedReward | None:
        """The failure that explains the others: the first one, but a late one only if all were late."""
        return self.whole or min(self.failures.values(), key=lambda one: one.is_late, default=None)

    def with_retries(self, parts: "list[CallResult]", seconds: float) -> "CallResult":
        """This result of the whole batch, or the result of its samples if they were retried alone."""
        if not parts:
            return replace(self, seconds=seconds)
        joined = CallResult.joined(parts)
        whole = self.first_failure if len(joined.failures) == len(parts) else None
        return replace(joined, seconds=seconds, whole=whole)

    def fail(self, sample: int, text: str) -> None:
        """Count a sample's reward as one that the function did not give."""
        self.values[sample] = FailedReward(RewardError(text), text)


def score(
    function: FunctionReward | ModelReward,
    batch: RewardBatch,
    trainer_state: Any,
    timeout: float,
    call: Callable[[Callable[[], CallResult], float, LateCalls], CallResult] = deadlines.call_with_deadline,
) -> CallResult:
    """Score with a sync function or a model. A function scores one batch at a time, from whichever thread.

    While a late call still runs, the next one waits for it (`LateCalls.wait`) and then fails: the function is not
    called before the late call has returned.

    An isolated function has half of the time for the whole batch. If it hangs, the other half is for the samples one by
    one, so that only the sample on which it hangs is lost.
    """
    alone, is_function = isinstance(function, IsolatedReward), isinstance(function, FunctionReward)

    def attempt(samples: RewardBatch, seconds: float) -> CallResult:
        log = Log(len(samples))

        def run() -> CallResult:
            try:
                with torch.enable_grad() if is_function else nullcontext():  # a function may train something of its own
                    return CallResult.of(function(samples, trainer_state, log), log)
            except (deadlines.Interrupt, deadlines.CallTimeout):
                raise
            except BaseException as error:  # SystemExit too, as code that a completion holds may raise it
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                return CallResult.failed(len(samples), error)

        try:
            if isinstance(function, IsolatedReward):
                return function.call(run, seconds)
            function.late.check()
            return call(run, seconds, function.late)
        except deadlines.StillRunning as refused:
            return CallResult.failed(len(samples), refused)
        except deadlines.CallTimeout:
            return CallResult.timed_out(len(samples), timeout)

    with function.turn if isinstance(function, FunctionReward) else nullcontext():
        function.late.wait()
        start = time.monotonic()
        whole = attempt(batch, timeout / 2 if alone and len(batch) > 1 else timeout)
        parts, samples = [], _samples_to_retry(whole, batch, alone and len(batch) > 1)
        for left in range(len(samples), 0, -1):
            if isinstance(function, IsolatedReward):
                function.restart(timeout - (time.monotonic() - start))
            seconds = timeout - (time.monotonic() - start)
            parts.append(attempt(samples[-left], seconds / left if alone else seconds))
        return whole.with_retries(parts, time.monotonic() - start)


async def score_async(function: FunctionReward, batch: RewardBatch, trainer_state: Any, timeout: float) -> CallResult:
    """Score with an async function; the samples of a batch that raised are retried concurrently."""
    start = time.monotonic()

    async def run(samples: RewardBatch) -> CallResult:
        log = Log(len(samples))
        begin_call(function.late)
        try:
            function.late.check()
            return CallResult.of(await function.call_async(samples, trainer_state, log), log)
        except BaseException as error:  # SystemExit would end the loop; a cancelled call is no longer awaited
            return CallResult.failed(len(samples), error)

    async def attempt(samples: RewardBatch) -> CallResult:
        left = timeout - (time.monotonic() - start)
        try:
            return await deadlines.await_future(asyncio.ensure_future(run(samples)), left)
        except deadlines.CallTimeout:
            return CallResult.timed_out(len(samples), timeout)

    whole = await attempt(batch)
    parts = await asyncio.gather(*map(attempt, _samples_to_retry(whole, batch, False)))
    return whole.with_retries(list(parts), time.monotonic() - start)


def _samples_to_retry(whole: CallResult, batch: RewardBatch, if_late: bool) -> list[RewardBatch]:
    error = whole.first_failure.error if whole.failures and whole.first_failure else None
    if isinstance(error, MissingArgument):
        raise error
    # A function that returned another number of rewards might return one for a single sample whatever that is.
    if error is None or isinstance(error, RewardError) or (isinstance(error, deadlines.CallTimeout) and not if_late):
        return []
    return [batch.take([index]) for index in range(len(batch))]


MAX_LATE_CALLS = 3  # late calls after which an ordinary function is not called for the rest of the batch
Span = tuple[float, float]  # begin and end of a call (`time.perf_counter`)
Lanes = dict[int, "AsyncLane | ThreadLane"]  # by the index of their function among all


class RewardStream:
    """Scores the rollouts of one batch as they end, and records their times.

    As a context manager: leaving it cancels calls of async functions, and calls of others that have not begun.
    Functions in `each` score single rollouts; functions in `groups` score complete groups.
    """

    def __init__(
        self,
        each: Lanes | None = None,
        groups: Lanes | None = None,
        tokenizer: Any = None,
        accepts: Callable[[int, Row], bool] = lambda function, row: True,
    ):
        self._tokenizer = tokenizer  # of the policy
        self._accepts = accepts  # (index of a function, row) -> it scores rollouts of this row
        self._each, self._groups = each or {}, groups or {}
        self._lanes = self._each | self._groups
        self._pending: dict[int, dict[int, Future[CallResult]]] = defaultdict(dict)  # by function and first sample
        self.rollout_spans: list[Span] = []  # begin and end of every rollout, in the order of their ends
        self._began = time.perf_counter()

    def __enter__(self) -> "RewardStream":
        return self

    def __exit__(self, *raised: Any) -> None:
        for index, lane in self._lanes.items():
            lane.close()
            for future in self._pending[index].values():
                future.cancel()

    def __contains__(self, index: int) -> bool:
        return index in self._lanes

    def on_rollouts(self, start: int, rows: list[Row], rollouts: list[Rollout]) -> None:
        now = time.perf_counter()
        self.rollout_spans += [(now - rollout.seconds if rollout.seconds else self._began, now) for rollout in rollouts]
        self._score(self._each, start, rows, rollouts)

    def on_group(self, start: int, rows: list[Row], rollouts: list[Rollout]) -> None:
        self._score(self._groups, start, rows, rollouts)

    def _score(self, lanes: Lanes, start: int, rows: list[Row], rollouts: list[Rollout]) -> None:
        batch = RewardBatch(rows, rollouts, self._tokenizer)
        batch = batch.take(batch.scorable)
        for index, lane in lanes.items():
            own = batch.take([place for place, row in enumerate(batch.rows) if self._accepts(index, row)])
            if len(own):
                self._pending[index][start] = lane.start(own)

    def results(self) -> dict[int, CallResult]:
        results: dict[int, CallResult] = {}
        for index, lane in self._lanes.items():
            results[index] = CallResult.joined([lane.result(call) for _, call in sorted(self._pending[index].items())])
        return results

    def spans(self) -> dict[int, list[Span]]:
        return {index: list(lane.spans) for index, lane in self._lanes.items()}


class AsyncLane:
    """Runs the calls of an async function concurrently."""

    def __init__(self, function: FunctionReward, loop: LoopThread, trainer_state: Any, timeout: float):
        self._function, self._loop, self._state, self._timeout = function, loop, trainer_state, timeout
        self._begun: dict[Future[CallResult], tuple[float, int]] = {}
        self.spans: list[Span] = []

    def start(self, batch: RewardBatch) -> "Future[CallResult]":
        future = self._loop.start(score_async(self._function, batch, self._state, self._timeout))
        self._begun[future] = time.monotonic(), len(batch)
        begun = time.perf_counter()
        future.add_done_callback(lambda _: self.spans.append((begun, time.perf_counter())))
        return future

    def result(self, future: "Future[CallResult]") -> CallResult:
        """Wait for a result; a coroutine that blocks the event loop counts as late."""
        begun, size = self._begun[future]
        try:
            return self._loop.wait(future, max(begun + self._timeout - time.monotonic(), 0.0) + LOOP_GRACE)
        except deadlines.CallTimeout:
            return CallResult.timed_out(size, self._timeout)

    def close(self) -> None: ...  # the loop belongs to the suite


class ThreadLane:
    """Runs the calls of an ordinary function one after another, on a thread of its own."""

    def __init__(self, function: FunctionReward, trainer_state: Any, timeout: float):
        self._function, self._state, self._timeout = function, trainer_state, timeout
        self._late = 0
        self.spans: list[Span] = []
        self._calls = deadlines.WorkerThread("covey-reward", deadlines.torch_settings())  # of the thread that makes it
        self._worker = deadlines.WorkerThread("covey-rewards")

    def start(self, batch: RewardBatch) -> "Future[CallResult]":
        return self._worker.submit(partial(self._score, batch))

    def result(self, future: "Future[CallResult]") -> CallResult:
        return future.result()  # ends: each call before it and its own has a deadline

    def close(self) -> None:
        self._worker.submit(self._calls.close)
        self._worker.close()

    def _score(self, batch: RewardBatch) -> CallResult:
        if self._late >= MAX_LATE_CALLS:
            return replace(CallResult.timed_out(len(batch), self._timeout), seconds=0.0)
        begun = time.perf_counter()
        outcome = score(self._function, batch, self._state, self._timeout, self._calls.call)
        self.spans.append((begun, time.perf_counter()))
        self._late += any(failure.is_late for failure in outcome.failures.values())
        return outcome
