"""One copy of a prompt for all its completions: `[prompt | completion 1 | ... | completion G]`, group after group.

Every completion's positions go on where the prompt ends, and it attends to the prompt and to itself. Instead of
G (P + R) tokens a group costs P + G R, exactly. Needs what the packed layout needs; the scorer checks it likewise.
"""

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.ragged import expand, segment_starts
from covey.policy.layouts.inputs import ModelInputs, ready_made_mask


def shared_prefix(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row; `shared_lengths` tells attention each group's prompt and completion lengths.

    The first token of every completion is predicted by the same state: that of the prompt's last token.
    """
    prompts, completions = batch.prompts(), batch.completions()
    members: list[list[int]] = [[] for _ in prompts]
    for rollout, group in enumerate(batch.groups.tolist()):
        members[group].append(rollout)
    device = batch.token_ids.device
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    starts = [0] * len(completions)
    prompt_ends = [0] * len(completions)
    place = 0
    for prompt, rollouts in zip(prompts, members, strict=True):
        ids.append(prompt)
        positions.append(torch.arange(len(prompt), device=device))
        place += len(prompt)
        end = place - 1
        for rollout in rollouts:
            ids.append(completions[rollout])
            positions.append(len(prompt) + torch.arange(len(completions[rollout]), device=device))
            starts[rollout], prompt_ends[rollout] = place, end
            place += len(completions[rollout])
    lengths = [
        (len(prompt), [len(completions[rollout]) for rollout in rollouts])
        for prompt, rollouts in zip(prompts, members, strict=True)
    ]
    return ModelInputs(
        kwargs={
            "input_ids": torch.cat(ids)[None],
            "attention_mask": ready_made_mask(device),
            "position_ids": torch.cat(positions)[None],
            "shared_lengths": lengths,
        },
        predictors=_predictors(batch, torch.tensor(starts, device=device), torch.tensor(prompt_ends, device=device)),
    )


def _predictors(batch: TrainBatch, starts: Tensor, prompt_ends: Tensor) -> Tensor:
    """[N]: the token before each completion token; before the first, the end of the prompt."""
    within = torch.arange(batch.num_tokens, device=starts.device) - expand(segment_starts(batch.lengths), batch.lengths)
    before = expand(starts, batch.lengths) + within - 1
    return torch.where(within == 0, expand(prompt_ends, batch.lengths), before)
