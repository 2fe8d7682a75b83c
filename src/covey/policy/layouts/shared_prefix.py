"""One copy of a prompt for all its completions: `[prompt | completion 1 | ... | completion G]`, group after group.

Every completion's positions go on where the prompt ends, and it attends to the prompt and to itself. Instead of
G (P + R) tokens a group costs P + G R, exactly. Needs what the packed layout needs; the scorer checks it likewise.
"""

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs, Segment, completion_spans, one_row, prompt_spans


def shared_prefix(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row, a tree of depth two for each group.

    The first token of every completion is predicted by the same state: that of the prompt's last token.
    """
    members: list[list[int]] = [[] for _ in range(len(batch.prompt_lengths))]
    for rollout, group in enumerate(batch.groups.tolist()):
        members[group].append(rollout)
    completions = completion_spans(batch)
    segments: list[Segment] = []
    paths: list[list[int]] = [[] for _ in completions]
    for prompt, rollouts in zip(prompt_spans(batch), members, strict=True):
        root = len(segments)
        segments.append(Segment((prompt,)))
        for rollout in rollouts:
            paths[rollout] = [root]
            start, stop = completions[rollout]
            if start < stop:
                paths[rollout].append(len(segments))
                segments.append(Segment((completions[rollout],), root))
    return one_row(batch, segments, paths)
