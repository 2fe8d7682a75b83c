"""All rollouts end to end in one row, each attending to itself alone: no padding at all.

Needs a decoder that goes through transformers' attention interface; the scorer checks that before trusting it.
"""

import torch

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs, predictor_positions, ready_made_mask, sequences


def packed(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row; positions restart with every rollout and `packed_lengths` tells attention where."""
    rows = sequences(batch)
    lengths = [len(row) for row in rows]
    device = batch.token_ids.device
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    return ModelInputs(
        kwargs={
            "input_ids": torch.cat(rows)[None],
            "attention_mask": ready_made_mask(device),
            "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
            "packed_lengths": lengths,
        },
        predictors=predictor_positions(batch, starts),
    )
