"""What every layout produces, and how segments of tokens become one row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.policy.attention import TokenTree


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward pass.

    Attributes:
        kwargs: keyword arguments of the model's forward; `input_ids` is [rows, width].
        predictors: [N] int64: for each completion token, the flat position (row * width + column) of the hidden
            state that predicts it.
        readers: a number for each rollout [B] -> for each place [rows * width] the sum of those whose rollouts read the
            token there: all siblings' for a prompt they share, 0 for padding.
    """

    kwargs: dict[str, Any]
    predictors: Tensor
    readers: Callable[[Tensor], Tensor]


class Segment(NamedTuple):
    """Tokens that stand together in a row.

    Attributes:
        pieces: (start, stop) ranges of the batch's tokens: `prompt_ids`, then `token_ids`.
        parent: the segment it goes on from, or -1.
    """

    pieces: tuple[tuple[int, int], ...]
    parent: int = -1

    @property
    def length(self) -> int:
        """Tokens of the segment."""
        return sum(stop - start for start, stop in self.pieces)


def one_row(batch: TrainBatch, segments: Sequence[Segment], paths: Sequence[Sequence[int]]) -> ModelInputs:
    """Lay segments in one row whose tokens attend within their segment and its ancestors.

    Args:
        batch: whose tokens they are.
        segments: none empty, in depth-first order.
        paths: for each rollout, the segments that make up its prompt and completion, in order.
    """
    tree = TokenTree([segment.length for segment in segments], [segment.parent for segment in segments])
    device = batch.token_ids.device
    order = _ranges([piece for segment in segments for piece in segment.pieces]).to(device)

    def readers(numbers: Tensor) -> Tensor:
        visits = [(rollout, segment) for rollout, path in enumerate(paths) for segment in path]
        by, of = (torch.tensor(column, dtype=torch.long, device=device) for column in zip(*visits, strict=True))
        totals = numbers.new_zeros(len(segments)).index_add(0, of, numbers[by])
        return totals.repeat_interleave(torch.tensor([segment.length for segment in segments], device=device))

    return ModelInputs(
        kwargs={
            "input_ids": torch.cat([batch.prompt_ids, batch.token_ids])[order][None],
            # Four-dimensional, which keeps transformers from building a quadratic mask that nobody would read.
            "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
            "position_ids": tree.positions().to(device)[None],
            "token_tree": tree,
        },
        predictors=_predictors(batch, tree, paths).to(device),
        readers=readers,
    )


def _predictors(batch: TrainBatch, tree: TokenTree, paths: Sequence[Sequence[int]]) -> Tensor:
    """[N]: the place in the row of the token before each completion token, along the rollout's own path."""
    prompts = batch.prompt_lengths.tolist()
    predictors = []
    for group, length, path in zip(batch.groups.tolist(), batch.lengths.tolist(), paths, strict=True):
        places = _ranges([(tree.starts[segment], tree.stops[segment]) for segment in path])
        first = prompts[group] - 1
        predictors.append(places[first : first + length])
    return torch.cat(predictors)


def _ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    """The numbers of several ranges one after the other, int64 on the CPU."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def prompt_spans(batch: TrainBatch) -> list[tuple[int, int]]:
    """Each prompt's (start, stop) in the batch's tokens, `prompt_ids` then `token_ids`."""
    return _spans(batch.prompt_lengths, 0)


def completion_spans(batch: TrainBatch) -> list[tuple[int, int]]:
    """Each completion's (start, stop) in the batch's tokens, `prompt_ids` then `token_ids`."""
    return _spans(batch.lengths, len(batch.prompt_ids))


def _spans(lengths: Tensor, first: int) -> list[tuple[int, int]]:
    stops = (lengths.cumsum(0) + first).tolist()
    return list(zip([first, *stops[:-1]], stops, strict=True)) if stops else []
