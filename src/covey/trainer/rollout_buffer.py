"""Rollout buffer: a generation, cut into the windows that belong to one optimizer step each.

A window is planned as a whole: its rollouts are assigned to micro-batches and processes by tokens.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.losses import BatchCounts, Weighting, mean_over_update, token_weights
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_indexes


@dataclass(frozen=True)
class PartOfStep:
    """A generation's contribution to an optimizer step.

    Attributes:
        own: this process's rollouts of the generation.
        index: the rollouts of all processes that the step trains on.
        micro_batches: nominal micro-batches.
        tokens: its trained tokens, as a share of the generation's: equal for every micro-batch.
    """

    own: OwnRollouts
    index: RolloutIndex
    micro_batches: int
    tokens: float


class RolloutBuffer:
    """A cursor over the nominal micro-batches of the current generation; it survives in checkpoints.

    The training loop's micro-steps come in stretches that end with an optimizer step or with the generation. `take`
    hands out the rollouts of a stretch, `spread` takes back the passes they were planned into, and `next` serves each
    micro-step its passes: none where there are fewer passes than micro-steps.
    """

    def __init__(self) -> None:
        self._own: OwnRollouts | None = None
        self._index: RolloutIndex | None = None
        self._parts: list[Tensor] = []
        self._passes = 0
        self._taken = 0
        self._waiting: deque[list[TrainBatch]] = deque()

    def refill(self, own: OwnRollouts, index: RolloutIndex, parts: list[Tensor], passes: int) -> None:
        """Start over with a new generation.

        Args:
            own: its rollouts of this process.
            index: of all processes' rollouts.
            parts: the rollouts of each nominal micro-batch, over all processes.
            passes: how often to go through them.
        """
        self._own, self._index = own, index
        self._parts, self._passes, self._taken = parts, passes, 0
        self._waiting.clear()

    def take(self, micro_steps: int) -> PartOfStep:
        """The rollouts of the next `micro_steps` nominal micro-batches, fewer where the generation ends.

        Raises:
            ValueError: there are none, which happens when a run is resumed in the middle of a generation without the
                buffer that a full checkpoint holds.
        """
        left = len(self._parts) * self._passes - self._taken
        if self._own is None or self._index is None or not left:
            raise ValueError(
                "the run goes on in the middle of a generation, but the generation is not there: the checkpoint was"
                " saved with save_only_model=True or by another trainer. Resume from a full checkpoint, or start a new"
                " run from the checkpoint's weights."
            )
        count = min(micro_steps, left)
        rows = [self._parts[i % len(self._parts)] for i in range(self._taken, self._taken + count)]
        self._taken += count
        tokens = int(self._index.sampled_lengths.sum()) * count / len(self._parts)
        return PartOfStep(self._own, self._index.select(torch.cat(rows)), count, tokens)

    def spread(self, passes: list[TrainBatch], micro_steps: int) -> None:
        """Deal passes out to the micro-steps of a stretch, evenly; the last one is never without."""
        cuts = [len(passes) * i // micro_steps for i in range(micro_steps + 1)]
        self._waiting.extend(passes[a:b] for a, b in pairwise(cuts))

    @property
    def is_planned(self) -> bool:
        """There are passes for the next micro-step."""
        return bool(self._waiting)

    def next(self) -> list[TrainBatch]:
        """The passes of one micro-step."""
        return self._waiting.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers. Checkpoints are made between optimizer steps, when no passes wait."""
        assert not self._waiting, "a stretch ends with its optimizer step"
        return {
            "batch": None if self._own is None else self._own.batch.state(),
            "rank": None if self._own is None else self._own.rank,
            "index": None if self._index is None else self._index.state(),
            "parts": self._parts,
            "passes": self._passes,
            "taken": self._taken,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        """Continue where `state` stopped, on the process that saved it; older ones hold the batch of all processes."""
        self._own, self._index = None, None
        batch = None if state["batch"] is None else TrainBatch.of_state(state["batch"])
        if batch is not None and "index" not in state:
            shares = torch.arange(len(batch)).view(ranks, -1)
            self._index = join_indexes([RolloutIndex.of(batch.select(rows), n) for n, rows in enumerate(shares)])
            self._own = OwnRollouts(batch.select(shares[rank]).to(device), rank)
        elif batch is not None and state["rank"] == rank:
            self._index = RolloutIndex(**state["index"])
            self._own = OwnRollouts(batch.to(device), rank)
        self._parts, self._passes, self._taken = state["parts"], state["passes"], state["taken"]
        self._waiting.clear()


def nominal_parts(rollouts: int, rows: int, ranks: int) -> list[Tensor]:
    """Indices of the rollouts of each nominal micro-batch: `rows` of every rank.

    Example:
        Two ranks with 4 rollouts each, 2 rows: [[0, 1, 4, 5], [2, 3, 6, 7]].
    """
    by_rank = torch.arange(rollouts).view(ranks, -1)
    return [part.flatten() for part in by_rank.split(rows, dim=1)]


def batch_counts(
    sampled_lengths: Tensor,
    *,
    rows_per_part: int,
    total_rows: int,
    total_tokens: float,
    total_parts: int,
    updates: float,
    max_completion_length: int | None,
) -> BatchCounts:
    """Counts over all processes that token weights are derived from.

    Args:
        sampled_lengths: [B] trained tokens of this process's share of the generation, or of all rollouts that an
            optimizer step takes from several.
        rows_per_part: rollouts of a nominal micro-batch.
        total_rows, total_tokens, total_parts: rollouts, trained tokens and nominal micro-batches of the whole
            generation (or of what the step takes), all processes together.
        updates: optimizer updates that go through them once.
        max_completion_length: for reductions by constant length.
    """
    tokens = sampled_lengths.float()
    totals = [part.sum().expand(len(part)) for part in tokens.split(rows_per_part)] if len(tokens) else []
    return BatchCounts(
        tokens=tokens,
        micro_tokens=torch.cat(totals) if totals else tokens,
        rows_per_update=total_rows / updates,
        tokens_per_update=total_tokens / updates,
        micro_batches_per_update=total_parts / updates,
        max_completion_length=max_completion_length,
    )


def weigh(batch: TrainBatch, weighting: Weighting, *, entropy_bonus: bool, **counted: Any) -> None:
    """Set the batch's token weights, from counts over all processes.

    Args:
        batch: this process's share of the generation.
        weighting: the algorithm's reduction.
        entropy_bonus: also set the weights of the entropy bonus: the token mean of the optimizer step.
        counted: as for `batch_counts`.
    """
    counts = batch_counts(batch.sampled_lengths, **counted)
    batch.weights = token_weights(weighting, counts, batch.sampled, batch.lengths)
    if entropy_bonus:
        batch.entropy_weights = token_weights(mean_over_update, counts, batch.sampled, batch.lengths)
