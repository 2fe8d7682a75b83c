"""What one generation leaves to train on, cut into the stretches that belong to one optimizer step each.

A stretch is planned as a whole: its rollouts are spread over forward passes, and over processes, by tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, join
from covey.core.weighting import BatchCounts, Weighting, mean_over_update, token_weights


@dataclass(frozen=True)
class PartOfStep:
    """A generation's contribution to an optimizer step.

    Attributes:
        batch: its rollouts, of all processes.
        micro_batches: nominal micro-batches.
        tokens: its trained tokens, as a share of the generation's: equal for every micro-batch.
    """

    batch: TrainBatch
    micro_batches: int
    tokens: float


class RolloutBuffer:
    """A cursor over the nominal micro-batches of the current generation; it survives in checkpoints.

    The training loop's micro-steps come in stretches that end with an optimizer step or with the generation. `take`
    hands out the rollouts of a stretch, `spread` takes back the passes they were planned into, and `next` serves each
    micro-step its passes: none where there are fewer passes than micro-steps.
    """

    def __init__(self) -> None:
        self._batch: TrainBatch | None = None
        self._parts: list[Tensor] = []
        self._passes = 0
        self._taken = 0
        self._waiting: deque[list[TrainBatch]] = deque()

    def refill(self, batch: TrainBatch, parts: list[Tensor], passes: int) -> None:
        """Start over with a new generation.

        Args:
            batch: its rollouts, of all processes.
            parts: the rollouts of each nominal micro-batch, over all processes.
            passes: how often to go through them.
        """
        self._batch, self._parts, self._passes, self._taken = batch, parts, passes, 0
        self._waiting.clear()

    def take(self, micro_steps: int) -> PartOfStep:
        """The rollouts of the next `micro_steps` nominal micro-batches, fewer where the generation ends.

        Raises:
            ValueError: there are none, which happens when a run is resumed in the middle of a generation without the
                buffer that a full checkpoint holds.
        """
        left = len(self._parts) * self._passes - self._taken
        if self._batch is None or not left:
            raise ValueError(
                "the run goes on in the middle of a generation, but the generation is not there: the checkpoint was"
                " saved with save_only_model=True or by another trainer. Resume from a full checkpoint, or start a new"
                " run from the checkpoint's weights."
            )
        count = min(micro_steps, left)
        rows = [self._parts[i % len(self._parts)] for i in range(self._taken, self._taken + count)]
        self._taken += count
        tokens = int(self._batch.sampled.sum()) * count / len(self._parts)
        return PartOfStep(self._batch.select(torch.cat(rows)), count, tokens)

    def spread(self, passes: list[TrainBatch], micro_steps: int) -> None:
        """Deal passes out to the micro-steps of a stretch, evenly; the last one is never without."""
        cuts = [len(passes) * i // micro_steps for i in range(micro_steps + 1)]
        self._waiting.extend(passes[a:b] for a, b in pairwise(cuts))

    def next(self) -> list[TrainBatch]:
        """The passes of one micro-step."""
        return self._waiting.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers. Checkpoints are made between optimizer steps, when no passes wait."""
        assert not self._waiting, "a stretch ends with its optimizer step"
        return {
            "batch": None if self._batch is None else self._batch.state(),
            "parts": self._parts,
            "passes": self._passes,
            "taken": self._taken,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue where `state` stopped."""
        batch = state["batch"]
        self._batch = None if batch is None else TrainBatch.of_state(batch).to(device)
        self._parts, self._passes, self._taken = state["parts"], state["passes"], state["taken"]
        self._waiting.clear()


def pool(batch: TrainBatch, gather: Callable[[Any], list[Any]]) -> TrainBatch:
    """The rollouts of all processes, in the order of ranks; every process gets the same.

    Args:
        batch: this process's share of a generation, as many rollouts as the others'; siblings may lie on two processes.
        gather: collective: this process's object to those of all.
    """
    shares = [TrainBatch.of_state(state) for state in gather(batch.state())]
    return join(shares).to(batch.lengths.device)


def nominal_parts(rollouts: int, rows: int, ranks: int) -> list[Tensor]:
    """Which of the pooled rollouts make up each nominal micro-batch: `rows` of every rank.

    Example:
        Two ranks with 4 rollouts each, 2 rows: [[0, 1, 4, 5], [2, 3, 6, 7]].
    """
    by_rank = torch.arange(rollouts).view(ranks, -1)
    return [part.flatten() for part in by_rank.split(rows, dim=1)]


def weigh(
    batch: TrainBatch,
    weighting: Weighting,
    *,
    rows_per_part: int,
    total_rows: int,
    total_tokens: float,
    total_parts: int,
    updates: float,
    max_completion_length: int | None,
    entropy_bonus: bool,
) -> None:
    """Set the batch's token weights, from counts over all processes.

    Args:
        batch: this process's share of the generation, or what an optimizer step takes from several.
        weighting: the algorithm's reduction.
        rows_per_part: rollouts of a nominal micro-batch.
        total_rows, total_tokens, total_parts: rollouts, trained tokens and nominal micro-batches of the whole
            generation (or of what the step takes), all processes together.
        updates: optimizer updates that go through them once.
        max_completion_length: for reductions by constant length.
        entropy_bonus: also set the weights of the entropy bonus: the token mean of the optimizer step.
    """
    tokens = batch.sampled_lengths.float()
    counts = BatchCounts(
        tokens=tokens,
        micro_tokens=_totals_by_part(tokens, rows_per_part),
        rows_per_update=total_rows / updates,
        tokens_per_update=total_tokens / updates,
        micro_batches_per_update=total_parts / updates,
        max_completion_length=max_completion_length,
    )
    batch.weights = token_weights(weighting, counts, batch.sampled, batch.lengths)
    if entropy_bonus:
        batch.entropy_weights = token_weights(mean_over_update, counts, batch.sampled, batch.lengths)


def _totals_by_part(tokens: Tensor, rows_per_part: int) -> Tensor:
    """Each rollout's micro-batch total: [B] -> [B]."""
    parts = tokens.split(rows_per_part)
    return torch.cat([part.sum().expand(len(part)) for part in parts]) if len(tokens) else tokens
