"""What one generation leaves to train on: micro-batches, served in order, as often as `num_iterations` says."""

from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.weighting import BatchCounts, Weighting, mean_over_update, token_weights


class Experience:
    """A cursor over the micro-batches of the current generation; it survives in checkpoints."""

    def __init__(self) -> None:
        self._parts: list[TrainBatch] = []
        self._passes = 0
        self._served = 0

    def refill(self, parts: list[TrainBatch], passes: int) -> None:
        """Start over with the micro-batches of a new generation, to be gone through `passes` times."""
        self._parts, self._passes, self._served = parts, passes, 0

    def upcoming(self, count: int) -> list[TrainBatch]:
        """The next `count` micro-batches, fewer where the generation ends."""
        last = len(self._parts) * self._passes
        return [self._parts[i % len(self._parts)] for i in range(self._served, min(self._served + count, last))]

    def next(self) -> TrainBatch:
        """Serve one micro-batch.

        Raises:
            ValueError: there is none, which happens when a run is resumed in the middle of a generation without the
                buffer that a full checkpoint holds.
        """
        if self._served >= len(self._parts) * self._passes:
            raise ValueError(
                "the run goes on in the middle of a generation, but the generation is not there: the checkpoint was"
                " saved with save_only_model=True or by another trainer. Resume from a full checkpoint, or start a new"
                " run from the checkpoint's weights."
            )
        self._served += 1
        return self._parts[(self._served - 1) % len(self._parts)]

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {"parts": [p.state() for p in self._parts], "passes": self._passes, "served": self._served}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue where `state` stopped."""
        self._parts = [TrainBatch(**part).to(device) for part in state["parts"]]
        self._passes, self._served = state["passes"], state["served"]


def weigh(
    batch: TrainBatch,
    weighting: Weighting,
    *,
    rows_per_part: int,
    total_rows: int,
    total_tokens: int,
    total_parts: int,
    updates: float,
    max_completion_length: int | None,
    entropy_bonus: bool,
) -> None:
    """Set the batch's token weights, from counts over all processes.

    Args:
        batch: this process's share of the generation.
        weighting: the algorithm's reduction.
        rows_per_part: rollouts of a nominal micro-batch.
        total_rows, total_tokens, total_parts: rollouts, trained tokens and nominal micro-batches of the whole
            generation, all processes together.
        updates: optimizer updates that go through the generation once.
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
