"""Distributions that tokens were drawn from: the softmax over the kept tokens only, after a repetition penalty.

DeepSeek-V3.2's "keep sampling mask" (arXiv 2512.02556, section 3.1). Letters: N positions; n of them and v vocabulary
entries in a tile; B rollouts, C tokens of their prompts and completions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, expand, segment_ids, segment_starts, token_index


class TileSupport(NamedTuple):
    """Changes of a tile's logits; each is None if it changes nothing."""

    excluded: Tensor | None  # [n, v] bool, tokens that could not be sampled
    penalised: Tensor | None  # [n, v] bool, tokens that had occurred before
    penalty: float

    def apply_(self, z: Tensor) -> Tensor | None:
        """Change logits z [n, v] in place; returns the derivative of new by old logits [n, v], None if it is 1."""
        slope = None
        if self.penalised is not None:
            slope = torch.full_like(z, self.penalty).masked_fill_(z > 0, 1.0 / self.penalty)
            z.mul_(slope.masked_fill_(~self.penalised, 1.0))
        if self.excluded is not None:
            z.masked_fill_(self.excluded, -torch.inf)
        return slope


@dataclass(frozen=True)
class SampledSupport:
    """Sampling masks and repetition penalty of the positions that are scored, on their device."""

    offsets: list[int] | None  # N + 1: where the `ids` of each position begin; None without masks
    ids: Tensor  # kept tokens of all positions, concatenated; a position without any keeps all
    rollout: Tensor  # [N] of each position, and [N] the number of its token in the completion
    index: Tensor
    penalty: float
    context: Tensor  # [3, C] int64: rollout, token, and its number in the completion, -1 in prompts; [3, 0] unless used
    num_rollouts: int

    @classmethod
    def of(cls, batch: TrainBatch, learned: Tensor, penalty: float) -> "SampledSupport":
        """Support of the tokens `learned` [N] of a batch."""
        counts, offsets, ids = batch.kept_counts, None, batch.token_ids[:0]
        if counts is not None and batch.kept_ids is not None:
            ids = batch.kept_ids[token_index(learned, counts)].long()
            offsets = [0, *counts[learned].cumsum(0).tolist()]
        rollout = segment_ids(batch.lengths)
        starts = expand(segment_starts(batch.lengths), batch.lengths)
        index = torch.arange(batch.num_tokens, device=rollout.device) - starts
        context = rollout.new_zeros(3, 0)
        if penalty != 1.0:
            prompts = batch.prompt_ids[token_index(batch.groups, batch.prompt_lengths)]
            of_prompts = segment_ids(batch.prompt_lengths[batch.groups])
            before = torch.stack([of_prompts, prompts, torch.full_like(prompts, -1)])
            context = torch.cat([before, torch.stack([rollout, batch.token_ids, index])], dim=1)
        return cls(offsets, ids, rollout[learned], index[learned], penalty, context, len(batch))

    def tile(self, part: slice, start: int, width: int) -> TileSupport:
        """Support of the positions `part` in the vocabulary entries start .. start + width."""
        rollout, index = self.rollout[part], self.index[part]
        excluded = penalised = None
        if self.offsets is not None:
            offsets = self.offsets[part.start : part.start + len(index) + 1]
            counts = torch.tensor(offsets, device=index.device).diff()
            kept = index.new_zeros(len(index), width + 1, dtype=torch.bool)  # the last column: ids outside of the tile
            kept[segment_ids(counts), _column(self.ids[offsets[0] : offsets[-1]], start, width)] = True
            excluded = ~kept[:, :width] & (counts > 0)[:, None]
        if self.penalty != 1.0:
            owner, token, number = self.context
            first = index.new_full((self.num_rollouts, width + 1), torch.iinfo(torch.int64).max)
            place = owner * (width + 1) + _column(token, start, width)
            first.view(-1).scatter_reduce_(0, place, number, "amin")
            penalised = first[rollout, :width] < index[:, None]
        return TileSupport(excluded, penalised, self.penalty)


def _column(ids: Tensor, start: int, width: int) -> Tensor:
    """Column of each token in a tile of words start .. start + width; `width` for a token outside of it."""
    return torch.where((ids >= start) & (ids < start + width), ids - start, width)
