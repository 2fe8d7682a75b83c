"""One row per rollout, padded on the right to the longest: slow, and right for every causal language model."""

import torch

from covey.core.batch import TrainBatch
from covey.core.ragged import expand, segment_starts
from covey.policy.layouts.inputs import ModelInputs


def padded(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """B rows of prompt, completion, padding."""
    prompts = batch.prompts()
    groups = batch.groups.tolist()
    rows = [torch.cat([prompts[g], completion]) for g, completion in zip(groups, batch.completions(), strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    prompt_lengths = batch.prompt_lengths[batch.groups]
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    # The state one before each completion token.
    first = torch.arange(len(rows), device=input_ids.device) * input_ids.shape[1] + prompt_lengths - 1
    within = torch.arange(batch.num_tokens, device=first.device) - expand(segment_starts(batch.lengths), batch.lengths)
    filled = column < (prompt_lengths + batch.lengths)[:, None]
    return ModelInputs(
        kwargs={
            "input_ids": input_ids,
            "attention_mask": filled.long(),
            "position_ids": column.expand(len(rows), -1),
        },
        predictors=expand(first, batch.lengths) + within,
        readers=lambda numbers: (filled * numbers[:, None]).flatten(),
    )
