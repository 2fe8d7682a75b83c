"""Scores rollouts as they end, while others are still sampled.

A `RewardStream` lives as long as one generation is sampled. Rollouts go in as they end, from whichever thread samples:
to functions that judge each completion by itself at once, to others when their group is complete. At the end each
function has one `Outcome` as if it had been called once. An async function scores all that is there at the same time;
an ordinary one scores one part after another, on a thread of its own. Not here: what failures lead to
(`covey.rewards.suite`), reward models (a batch of their own, after sampling).
"""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from covey.core.rollout import Rollout
from covey.rewards.batch import RewardBatch
from covey.rewards.call import LOOP_GRACE, Outcome, score, score_async
from covey.rewards.functions import FunctionReward
from covey.runtime.deadlines import CallThread, CallTimeout
from covey.runtime.loop_thread import LoopThread
from covey.runtime.worker_thread import WorkerThread

LATE_PARTS = 3
"""After this many calls in which an ordinary function was late, it is not called for the rest of the generation."""

Span = tuple[float, float]
"""Begin and end of a call, by `time.perf_counter`."""


class RewardStream:
    """The functions of a run on the rollouts of one generation. A context manager: leaving it gives up what is left.

    Args:
        each: functions that get rollouts as they end, by their place among all functions.
        groups: likewise, functions that get whole groups.
        loop: where async functions run.
        trainer_state: what the functions see of the trainer.
        timeout: seconds that one function may take for one call.

    Example:
        >>> from covey.core.rollout import FinishReason
        >>> def short(completions):
        ...     return [-float(len(text)) for text in completions]
        >>> rollouts = [Rollout([1], [2], [True], None, text, FinishReason.STOP) for text in ("four", "a")]
        >>> each, loop = {0: FunctionReward(short, "short")}, LoopThread("rewards")
        >>> with RewardStream(each, {}, loop, None, timeout=60.0) as stream:
        ...     stream.on_rollouts(1, [{"prompt": "?"}], rollouts[1:])
        ...     stream.on_rollouts(0, [{"prompt": "?"}], rollouts[:1])
        ...     stream.outcome(0).values
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
        self._pending: dict[int, dict[int, Future[Outcome]]] = {index: {} for index in self._lanes}

    def __enter__(self) -> "RewardStream":
        return self

    def __exit__(self, *raised: Any) -> None:
        for index, lane in self._lanes.items():
            lane.close()
            for future in self._pending[index].values():
                future.cancel()

    def __contains__(self, index: int) -> bool:
        """Whether that function is scored here."""
        return index in self._lanes

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Begin to score rollouts that have ended, with the functions that judge each by itself.

        Args:
            place: of the first among all of the generation; the others follow it. They may come in any order.
            rows: the dataset row of every rollout.
            rollouts: that ended at once: one, or siblings.
        """
        self._start(self._each, place, rows, rollouts)

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Begin to score a group that is complete, with the other functions.

        Args:
            place, rows, rollouts: as for `on_rollouts`.
        """
        self._start(self._groups, place, rows, rollouts)

    def _start(
        self, functions: tuple[int, ...], place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]
    ) -> None:
        batch = RewardBatch(rows, rollouts).scorable()
        if len(batch):
            for index in functions:
                self._pending[index][place] = self._lanes[index].start(batch)

    def outcome(self, index: int) -> Outcome:
        """What a function made of all that came, in the order of their places. Waits for what is not done.

        Raises:
            RewardError: it broke its contract.
        """
        lane, pending = self._lanes[index], self._pending[index]
        return Outcome.joined([lane.result(pending[place]) for place in sorted(pending)])

    def spans(self) -> dict[int, list[Span]]:
        """When the calls of each function began and ended, in the order of their ends."""
        return {index: list(lane.spans) for index, lane in self._lanes.items()}


class _AsyncLane:
    """Scores with an async function, all parts at the same time."""

    def __init__(self, function: FunctionReward, loop: LoopThread, trainer_state: Any, timeout: float):
        self._function, self._loop, self._state, self._timeout = function, loop, trainer_state, timeout
        self._begun: dict[Future[Outcome], tuple[float, int]] = {}
        self.spans: list[Span] = []

    def start(self, batch: RewardBatch) -> "Future[Outcome]":
        future = self._loop.start(score_async(self._function, batch, self._state, self._timeout))
        self._begun[future] = time.monotonic(), len(batch)
        begun = time.perf_counter()
        future.add_done_callback(lambda _: self.spans.append((begun, time.perf_counter())))
        return future

    def result(self, future: "Future[Outcome]") -> Outcome:
        begun, size = self._begun[future]
        try:
            return self._loop.wait(future, begun + self._timeout + LOOP_GRACE - time.monotonic())
        except CallTimeout:
            return Outcome.timed_out(size, self._timeout)

    def close(self) -> None:
        """Nothing to end: the loop is the suite's."""


class _ThreadLane:
    """Scores with an ordinary function, one part after another, on a thread of its own."""

    def __init__(self, function: FunctionReward, trainer_state: Any, timeout: float):
        self._function, self._state, self._timeout = function, trainer_state, timeout
        self._late = 0
        self.spans: list[Span] = []
        self._call = CallThread()  # here, for it takes over the settings of this thread
        self._worker = WorkerThread("covey-rewards")
        self._started = False

    def start(self, batch: RewardBatch) -> "Future[Outcome]":
        self._started = True
        return self._worker.submit(partial(self._score, batch))

    def result(self, future: "Future[Outcome]") -> Outcome:
        return future.result()  # ends: each call before it and its own has a deadline

    def close(self) -> None:
        """End both threads after the current call."""
        if self._started:
            self._worker.submit(self._call.close)
            self._worker.close()

    def _score(self, batch: RewardBatch) -> Outcome:
        if self._late >= LATE_PARTS:
            return Outcome.timed_out(len(batch), 0.0)
        begun = time.perf_counter()
        outcome = score(self._function, batch, self._state, self._timeout, self._call)
        self.spans.append((begun, time.perf_counter()))
        self._late += bool(outcome.timeouts)
        return outcome
