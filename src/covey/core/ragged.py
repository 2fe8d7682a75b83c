"""Sums, means and gathers over ragged sequences stored flat.

A ragged batch is a flat vector `values [N]` and `lengths [B]` with `lengths.sum() == N`: sequence i owns the
slice that starts at `lengths[:i].sum()`. Nothing is padded.
"""

import torch
from torch import Tensor


def segment_ids(lengths: Tensor) -> Tensor:
    """Sequence index of every token: `[2, 0, 3] -> [0, 0, 2, 2, 2]`. lengths [B] -> [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def segment_starts(lengths: Tensor) -> Tensor:
    """Offset of each sequence's first token: `[2, 0, 3] -> [0, 2, 2]`. lengths [B] -> [B]."""
    return lengths.cumsum(0) - lengths


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Give every token its sequence's value: values [B], lengths [B] -> [N]."""
    return torch.repeat_interleave(values, lengths)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sequence: values [N], lengths [B] -> [B]; an empty sequence sums to 0."""
    out = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return out.index_add(0, segment_ids(lengths), values)


def masked_segment_mean(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of the masked tokens of each sequence, 0 where none is: values, mask [N], lengths [B] -> [B]."""
    count = segment_sum(mask.to(values.dtype), lengths)
    return segment_sum(torch.where(mask, values, 0.0), lengths) / count.clamp(min=1.0)


def token_index(rows: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the tokens of `rows`, in that order: rows [R], lengths [B] -> [sum of the rows' lengths]."""
    chosen = lengths[rows]
    within = torch.arange(int(chosen.sum()), device=lengths.device) - expand(segment_starts(chosen), chosen)
    return expand(segment_starts(lengths)[rows], chosen) + within
