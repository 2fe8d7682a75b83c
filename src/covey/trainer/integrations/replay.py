"""Rollouts of an earlier run in place of new ones."""

from dataclasses import dataclass

from covey.core.records import MicroStep
from covey.observability.record import Replay
from covey.trainer.rollout_phase import RolloutBatch, RolloutPhase


@dataclass(eq=False)
class ReplayPhase(RolloutPhase):
    """Reads training's rollouts from a record; evaluations are sampled."""

    replay: Replay

    def next(self, step: MicroStep) -> RolloutBatch:
        if not self.context.training:
            return super().next(step)
        mode, number = self.next_key()
        return RolloutBatch((mode, number), self.replay.load(number))

    def launch(self, generation: int | None) -> None:
        """Launch nothing: what was sampled ahead is in the record."""
