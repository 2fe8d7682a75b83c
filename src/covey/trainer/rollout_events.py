"""Hears of the rollouts of one generation as they end: notes when, and hands them to the rewards that begin at once."""

from time import perf_counter
from typing import Any

from covey.core.rollout import Rollout
from covey.observability.timeline import ROLLOUTS, Span, Timeline, covered
from covey.rewards.streaming import RewardStream


class RolloutListener:
    """What the collector tells (`covey.rollout.collector.Ended`). A context manager: leaving it gives up its rewards.

    Args:
        stream: scores rollouts as they end; None where rewards wait for the generation's turn.

    Attributes:
        stream: as above.
        spans: begin and end of every rollout, in the order of their ends.
    """

    def __init__(self, stream: RewardStream | None = None):
        self.stream = stream
        self.spans: list[Span] = []
        self._began = perf_counter()

    def __enter__(self) -> "RolloutListener":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*raised)

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Rollouts have ended."""
        now = perf_counter()
        self.spans += [(now - rollout.seconds if rollout.seconds else self._began, now) for rollout in rollouts]
        if self.stream is not None:
            self.stream.on_rollouts(place, rows, rollouts)

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """All rollouts of a group have ended."""
        if self.stream is not None:
            self.stream.on_group(place, rows, rollouts)

    def tell(self, timeline: Timeline, names: list[str]) -> None:
        """Add everything to a timeline, once the generation has been scored.

        Args:
            timeline: what is told.
            names: of the reward functions.
        """
        timeline.add(ROLLOUTS, "", self.spans)
        if self.stream is None:
            return
        calls = self.stream.spans()
        for index, spans in calls.items():
            timeline.add(names[index], "", spans)
        last = max((end for _, end in self.spans), default=self._began)
        timeline.overlap("reward", covered((span for spans in calls.values() for span in spans), until=last))
