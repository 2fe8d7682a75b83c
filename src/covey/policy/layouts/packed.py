"""All rollouts end to end in one row, each attending to itself alone: no padding at all.

Needs a decoder that goes through transformers' attention interface; the scorer checks that before trusting it.
"""

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs, Segment, completion_spans, one_row, prompt_spans


def packed(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row; positions restart with every rollout."""
    prompts = prompt_spans(batch)
    segments = [
        Segment((prompts[group], completion))
        for group, completion in zip(batch.groups.tolist(), completion_spans(batch), strict=True)
    ]
    return one_row(batch, segments, [[place] for place in range(len(segments))])
