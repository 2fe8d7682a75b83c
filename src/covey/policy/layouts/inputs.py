"""What every layout produces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.ragged import expand, segment_starts


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward pass.

    Attributes:
        kwargs: keyword arguments of the model's forward; `input_ids` is [rows, width].
        predictors: [N] int64: for each completion token, the flat position (row * width + column) of the hidden
            state that predicts it.
    """

    kwargs: dict[str, Any]
    predictors: Tensor


def sequences(batch: TrainBatch) -> list[Tensor]:
    """Prompt and completion of each rollout, joined: B tensors."""
    prompts = batch.prompts()
    groups = batch.groups.tolist()
    return [
        torch.cat([prompts[group], completion]) for group, completion in zip(groups, batch.completions(), strict=True)
    ]


def predictor_positions(batch: TrainBatch, sequence_starts: Tensor) -> Tensor:
    """[N]: the state one before each completion token, given where each rollout's sequence starts ([B])."""
    first = sequence_starts + batch.prompt_lengths[batch.groups] - 1
    within = torch.arange(batch.num_tokens, device=first.device) - expand(segment_starts(batch.lengths), batch.lengths)
    return expand(first, batch.lengths) + within


def ready_made_mask(device: torch.device) -> Tensor:
    """A four-dimensional mask, which keeps transformers from building a quadratic one that nobody would read."""
    return torch.zeros(1, 1, 1, 1, device=device)
