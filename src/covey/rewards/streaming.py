"""Reward functions that score rollouts as they end, while others are still sampled.

An async function scores all that have ended concurrently; an ordinary one scores them one call after another, on a
thread of its own. Reward models wait for the whole batch.
"""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from covey.core.records import Rollout
from covey.rewards.batch import RewardBatch
from covey.rewards.call import CallResult, collect_async, score, score_async
from covey.rewards.functions import FunctionReward
from covey.runtime.deadlines import CallThread
from covey.runtime.loop_thread import LoopThread
from covey.runtime.worker_thread import WorkerThread

MAX_LATE_CALLS = 3
"""After this many late calls an ordinary function is not called for the rest of the batch."""

Span = tuple[float, float]
"""Begin and end of a call (`time.perf_counter`)."""


class RewardStream:
    """Scores the rollouts of one batch. A context manager: leaving it cancels calls that have not begun.

    Args:
        each: functions that score each rollout when it ends, by their index among all functions.
        groups: likewise, functions that score complete groups.
        loop: runs async functions.
        trainer_state: passed to the functions.
        timeout: seconds for one call of one function.

    Example:
        >>> from covey.core.records import FinishReason
        >>> def short(completions):
        ...     return [-float(len(text)) for text in completions]
        >>> rollouts = [Rollout([1], [2], [True], None, text, FinishReason.STOP) for text in ("four", "a")]
        >>> each, loop = {0: FunctionReward(short, "short")}, LoopThread("rewards")
        >>> with RewardStream(each, {}, loop, None, timeout=60.0) as stream:
        ...     stream.on_rollouts(1, [{"prompt": "?"}], rollouts[1:])
        ...     stream.on_rollouts(0, [{"prompt": "?"}], rollouts[:1])
        ...     stream.result(0).values
        [-4.0, -1.0]
    """

    def __init__(
        self,
        each: dict[int, FunctionReward],
        groups: dict[int, FunctionReward],
        loop: LoopThread,
        trainer_state: Any,
        timeout: float,
    ):
        self._each, self._groups = tuple(each), tuple(groups)
        self._lanes: dict[int, _AsyncLane | _ThreadLane] = {
            index: _AsyncLane(function, loop, trainer_state, timeout)
            if function.is_async
            else _ThreadLane(function, trainer_state, timeout)
            for index, function in (each | groups).items()
        }
        self._pending: dict[int, dict[int, Future[CallResult]]] = {index: {} for index in self._lanes}

    def __enter__(self) -> "RewardStream":
        return self

    def __exit__(self, *raised: Any) -> None:
        for index, lane in self._lanes.items():
            lane.close()
            for future in self._pending[index].values():
                future.cancel()

    def __contains__(self, index: int) -> bool:
        """True if the stream calls the function of that index."""
        return index in self._lanes

    def on_rollouts(self, start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Score rollouts that have ended with the functions for single rollouts.

        Args:
            start: index of the first in the batch; the others follow it. Calls may come in any order.
            rows: the dataset row of every rollout.
            rollouts: one, or several of a group.
        """
        self._score(self._each, start, rows, rollouts)

    def on_group(self, start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Score a complete group with the other functions.

        Args:
            start, rows, rollouts: as for `on_rollouts`.
        """
        self._score(self._groups, start, rows, rollouts)

    def _score(
        self, functions: tuple[int, ...], start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]
    ) -> None:
        batch = RewardBatch(rows, rollouts)
        batch = batch.take(batch.scorable)
        if len(batch):
            for index in functions:
                self._pending[index][start] = self._lanes[index].start(batch)

    def result(self, index: int) -> CallResult:
        """Wait for all calls of a function; their rewards in the order of the batch.

        Raises:
            RewardError: the function broke its contract.
        """
        lane, pending = self._lanes[index], self._pending[index]
        return CallResult.joined([lane.result(pending[start]) for start in sorted(pending)])

    def spans(self) -> dict[int, list[Span]]:
        """Begin and end of each call by function, in the order of the ends."""
        return {index: list(lane.spans) for index, lane in self._lanes.items()}


class _AsyncLane:
    """Concurrent calls of an async function."""

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
        begun, size = self._begun[future]
        left = begun + self._timeout - time.monotonic()
        return collect_async(self._loop, future, size, left, self._timeout)

    def close(self) -> None:
        """Do nothing: the loop belongs to the suite."""


class _ThreadLane:
    """Calls of an ordinary function, one after another, on a thread of its own."""

    def __init__(self, function: FunctionReward, trainer_state: Any, timeout: float):
        self._function, self._state, self._timeout = function, trainer_state, timeout
        self._late = 0
        self.spans: list[Span] = []
        self._call = CallThread()  # made here, since it takes over the torch settings of this thread
        self._worker = WorkerThread("covey-rewards")
        self._started = False

    def start(self, batch: RewardBatch) -> "Future[CallResult]":
        self._started = True
        return self._worker.submit(partial(self._score, batch))

    def result(self, future: "Future[CallResult]") -> CallResult:
        return future.result()  # ends: each call before it and its own has a deadline

    def close(self) -> None:
        """End both threads after the current call."""
        if self._started:
            self._worker.submit(self._call.close)
            self._worker.close()

    def _score(self, batch: RewardBatch) -> CallResult:
        if self._late >= MAX_LATE_CALLS:
            return CallResult.timed_out(len(batch), 0.0)
        begun = time.perf_counter()
        outcome = score(self._function, batch, self._state, self._timeout, self._call)
        self.spans.append((begun, time.perf_counter()))
        self._late += bool(outcome.timeouts)
        return outcome
