"""One row per rollout, padded on the right to the longest: slow, and right for every causal language model."""

import torch

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs, predictor_positions, sequences


def padded(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """B rows of prompt, completion, padding."""
    rows = sequences(batch)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(row) for row in rows], device=input_ids.device)
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    starts = torch.arange(len(rows), device=input_ids.device) * input_ids.shape[1]
    return ModelInputs(
        kwargs={
            "input_ids": input_ids,
            "attention_mask": (column < lengths[:, None]).long(),
            "position_ids": column.expand(len(rows), -1),
        },
        predictors=predictor_positions(batch, starts),
    )
