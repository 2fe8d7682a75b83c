"""Scores each group as soon as it is sampled, while other groups still are.

A `RewardStream` lives as long as one generation is sampled: groups go in as they finish, from whichever thread samples,
and at the end each function has one `Outcome` as if it had been called once. Async functions score all groups that are
there at the same time; an ordinary function scores one group after another, on a thread of its own. Not here: what
failures lead to (`covey.rewards.suite`), reward models (a batch of their own, after sampling).
"""

import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

from covey.core.rollout import Rollout
from covey.rewards.batch import RewardBatch
from covey.rewards.functions import FunctionReward
from covey.rewards.scoring import Outcome, score, score_async
from covey.rewards.workers import LOOP_GRACE, BackgroundLoop, DeadlineExceeded, settings_of_this_thread

LATE_GROUPS = 3
"""After this many groups on which an ordinary function was late, it is not called for the rest of the generation."""


class RewardStream:
    """The functions of a run on the groups of one generation. A context manager: leaving it gives up what is left.

    Args:
        functions: those that are scored here, by their place among all.
        loop: where async functions run.
        trainer_state: what the functions see of the trainer.
        timeout: seconds that one function may take for one group.

    Example:
        >>> from covey.core.rollout import FinishReason
        >>> def short(completions):
        ...     return [-float(len(text)) for text in completions]
        >>> rollouts = [Rollout([1], [2], [True], None, text, FinishReason.STOP) for text in ("four", "a")]
        >>> with RewardStream({0: FunctionReward(short, "short")}, BackgroundLoop(), None, timeout=60.0) as stream:
        ...     stream.add(1, [{"prompt": "?"}], rollouts[1:])
        ...     stream.add(0, [{"prompt": "?"}], rollouts[:1])
        ...     stream.outcome(0).values
        [-4.0, -1.0]
    """

    def __init__(self, functions: dict[int, FunctionReward], loop: BackgroundLoop, trainer_state: Any, timeout: float):
        lanes = {
            index: _AsyncLane(function, loop, trainer_state, timeout)
            if function.is_async
            else _ThreadLane(function, trainer_state, timeout)
            for index, function in functions.items()
        }
        self._lanes: dict[int, _AsyncLane | _ThreadLane] = lanes
        self._pending: dict[int, dict[int, Future[Outcome]]] = {index: {} for index in lanes}

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

    def add(self, number: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Begin to score a group.

        Args:
            number: its place in the generation; groups may come in any order.
            rows: the dataset row of every rollout.
            rollouts: of the group.
        """
        batch = RewardBatch(rows, rollouts)
        for index, lane in self._lanes.items():
            self._pending[index][number] = lane.start(batch)

    def outcome(self, index: int) -> Outcome:
        """What a function made of all groups, in the order of their numbers. Waits for those that are not done.

        Raises:
            RewardError: it broke its contract.
        """
        lane, pending = self._lanes[index], self._pending[index]
        return Outcome.joined([lane.result(pending[number]) for number in sorted(pending)])


class _AsyncLane:
    """Scores groups with an async function, all at the same time."""

    def __init__(self, function: FunctionReward, loop: BackgroundLoop, trainer_state: Any, timeout: float):
        self._function, self._loop, self._state, self._timeout = function, loop, trainer_state, timeout
        self._begun: dict[Future[Outcome], tuple[float, int]] = {}

    def start(self, batch: RewardBatch) -> "Future[Outcome]":
        future = self._loop.start(score_async(self._function, batch, self._state, self._timeout))
        self._begun[future] = time.monotonic(), len(batch)
        return future

    def result(self, future: "Future[Outcome]") -> Outcome:
        begun, size = self._begun[future]
        try:
            return self._loop.wait(future, begun + self._timeout + LOOP_GRACE - time.monotonic())
        except DeadlineExceeded:
            return Outcome.timed_out(size, self._timeout)

    def close(self) -> None:
        """Nothing to end: the loop is the suite's."""


class _ThreadLane:
    """Scores groups with an ordinary function, one after another, on a thread of its own."""

    def __init__(self, function: FunctionReward, trainer_state: Any, timeout: float):
        self._function, self._state, self._timeout = function, trainer_state, timeout
        self._late = 0
        self._queue: queue.Queue[tuple[RewardBatch, Future[Outcome]] | None] = queue.Queue()
        settings = settings_of_this_thread()
        threading.Thread(target=self._serve, args=(settings,), name="covey-rewards", daemon=True).start()

    def start(self, batch: RewardBatch) -> "Future[Outcome]":
        future: Future[Outcome] = Future()
        self._queue.put((batch, future))
        return future

    def result(self, future: "Future[Outcome]") -> Outcome:
        return future.result()  # ends: each call before it and its own has a deadline

    def close(self) -> None:
        """End the thread after what it is at."""
        self._queue.put(None)

    def _serve(self, settings: Any) -> None:
        with settings():
            while (item := self._queue.get()) is not None:
                batch, future = item
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(self._score(batch))
                    except BaseException as error:  # carried to who waits
                        future.set_exception(error)

    def _score(self, batch: RewardBatch) -> Outcome:
        if self._late >= LATE_GROUPS:
            return Outcome.timed_out(len(batch), 0.0)
        outcome = score(self._function, batch, self._state, self._timeout)
        self._late += bool(outcome.timeouts)
        return outcome
