"""Layouts of a batch's ragged tokens for one forward pass: padded, packed, or with shared prefixes.

A layout turns prompts and completions into model inputs and gives, for every completion token, the hidden state that
predicts it. To add one, write a function of the signature `Layout` and add it to `LAYOUTS`. The layouts that put many
sequences in one row need a decoder that goes through transformers' attention interface, which
`covey.policy.layout_selection` checks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, expand, segment_starts
from covey.policy.attention import TokenTree

WORTH_SHARING = 8
"""Fewest common tokens for which completions share a branch: each branch costs attention two more calls."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward pass.

    Attributes:
        kwargs: keyword arguments of the model's forward; `input_ids` is [rows, width].
        predictors: [N] int64: for each completion token, the flat position (row * width + column) of the hidden
            state that predicts it.
        sum_over_readers: from a number per rollout [B] to the sum, for each position [rows * width], over the rollouts
            that contain its token: all of a group's for a shared prompt, 0 for padding.
    """

    kwargs: dict[str, Any]
    predictors: Tensor
    sum_over_readers: Callable[[Tensor], Tensor]


Layout = Callable[[TrainBatch, int], ModelInputs]
"""(batch, pad token id) -> model inputs."""

Span = tuple[int, int]
"""(start, stop) of the batch's tokens, `prompt_ids` then `token_ids`."""


class Segment(NamedTuple):
    """Adjacent tokens of a row.

    Attributes:
        spans: ranges of the batch's tokens.
        parent: index of the segment that it continues, or -1.
    """

    spans: tuple[Span, ...]
    parent: int = -1


def padded(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row per rollout, padded on the right to the longest: slow, and right for every causal language model."""
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
        sum_over_readers=lambda numbers: (filled * numbers[:, None]).flatten(),
    )


def packed(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """All rollouts end to end in one row without padding; each attends to itself alone, positions restart."""
    prompts, completions = _prompt_and_completion_spans(batch)
    groups = batch.groups.tolist()
    segments = [Segment((prompts[group], completion)) for group, completion in zip(groups, completions, strict=True)]
    return _one_row(batch, segments, [[index] for index in range(len(segments))])


def shared_prefix(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row with one copy of a prompt for all its completions: `[prompt | completion 1 | ... | completion G]`.

    Every completion's positions continue those of the prompt, and it attends to the prompt and to itself. Instead of
    G (P + R) tokens a group costs P + G R, exactly. Completions with a common beginning (common turns, duplicates)
    share it as a branch. The first token of every completion is predicted by the state of the prompt's last token, and
    the first token of every branch by the last state that its branches share.
    """
    prompts, completions = _prompt_and_completion_spans(batch)
    members: list[list[int]] = [[] for _ in prompts]
    for rollout, group in enumerate(batch.groups.tolist()):
        members[group].append(rollout)
    forest = _Forest(batch, completions)
    for prompt, rollouts in zip(prompts, members, strict=True):
        root = forest.add((prompt,), -1, rollouts)
        forest.grow(rollouts, 0, root)
    return _one_row(batch, forest.segments, forest.paths)


LAYOUTS: dict[str, Layout] = {"shared_prefix": shared_prefix, "packed": packed, "padded": padded}
"""Fastest first; the last one suits every model."""


class _Forest:
    """Segments in depth-first order, and each rollout's path through them."""

    def __init__(self, batch: TrainBatch, spans: list[Span]):
        self.spans = spans
        self.segments: list[Segment] = []
        self.paths: list[list[int]] = []
        self.tokens: list[list[int]] = []
        for completion in batch.completions():
            self.tokens.append(completion.tolist())
            self.paths.append([])

    def add(self, spans: tuple[Span, ...], parent: int, rollouts: list[int]) -> int:
        """Add a segment of these rollouts; returns its index."""
        index = len(self.segments)
        self.segments.append(Segment(spans, parent))
        for rollout in rollouts:
            self.paths[rollout].append(index)
        return index

    def grow(self, rollouts: list[int], done: int, parent: int) -> None:
        """Add segments after the first `done` tokens, which all these rollouts have in common."""
        for cluster in self._clusters(rollouts, done):
            first = self.spans[cluster[0]][0]
            # Clusters are sorted, so all members have in common what the first and the last have.
            shared = _common_length(self.tokens[cluster[0]], self.tokens[cluster[-1]])
            if shared > done:
                branch = self.add(((first + done, first + shared),), parent, cluster)
                if len(cluster) > 1:
                    self.grow(cluster, shared, branch)

    def _clusters(self, rollouts: list[int], done: int) -> list[list[int]]:
        """Unfinished rollouts sorted by tokens, those whose next tokens are worth sharing together."""
        clusters: list[list[int]] = []
        next_tokens = slice(done, done + WORTH_SHARING)
        for rollout in sorted(rollouts, key=self.tokens.__getitem__):
            tokens = self.tokens[rollout]
            if len(tokens) <= done:
                continue
            begins = tokens[next_tokens]
            if clusters and len(begins) == WORTH_SHARING and begins == self.tokens[clusters[-1][-1]][next_tokens]:
                clusters[-1].append(rollout)
            else:
                clusters.append([rollout])
        return clusters


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of first tokens that are equal: `[1, 2, 3], [1, 2, 4, 5] -> 2`."""
    if a is b:
        return len(a)
    length = min(len(a), len(b))
    for index in range(length):
        if a[index] != b[index]:
            return index
    return length


def _one_row(batch: TrainBatch, segments: Sequence[Segment], paths: Sequence[Sequence[int]]) -> ModelInputs:
    """Lay segments in one row whose tokens attend within their segment and its ancestors.

    Args:
        batch: source of the tokens.
        segments: none empty, in depth-first order.
        paths: per rollout, the segments of its prompt and completion, in order.
    """
    device = batch.token_ids.device
    lengths, parents, sources = [], [], []
    for spans, parent in segments:
        length = 0
        for start, stop in spans:
            length += stop - start
            sources.append(torch.arange(start, stop))
        lengths.append(length)
        parents.append(parent)
    tree = TokenTree(lengths, parents)
    order = torch.cat(sources).to(device)

    def sum_over_readers(numbers: Tensor) -> Tensor:
        visits = [(rollout, segment) for rollout, path in enumerate(paths) for segment in path]
        by, of = (torch.tensor(column, dtype=torch.long, device=device) for column in zip(*visits, strict=True))
        totals = numbers.new_zeros(len(segments)).index_add(0, of, numbers[by])
        return totals.repeat_interleave(torch.tensor(lengths, device=device))

    return ModelInputs(
        kwargs={
            "input_ids": torch.cat([batch.prompt_ids, batch.token_ids])[order][None],
            # Four-dimensional, which keeps transformers from building a quadratic mask that nothing reads.
            "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
            "position_ids": tree.positions().to(device)[None],
            "token_tree": tree,
        },
        predictors=_predictors(batch, tree, paths).to(device),
        sum_over_readers=sum_over_readers,
    )


def _predictors(batch: TrainBatch, tree: TokenTree, paths: Sequence[Sequence[int]]) -> Tensor:
    """[N]: position in the row of the token before each completion token, along the rollout's path."""
    prompts = batch.prompt_lengths.tolist()
    predictors = []
    for group, length, path in zip(batch.groups.tolist(), batch.lengths.tolist(), paths, strict=True):
        positions = torch.cat([torch.arange(tree.starts[segment], tree.stops[segment]) for segment in path])
        first = prompts[group] - 1
        predictors.append(positions[first : first + length])
    return torch.cat(predictors)


def _prompt_and_completion_spans(batch: TrainBatch) -> tuple[list[Span], list[Span]]:
    spans = []
    for lengths, first in ((batch.prompt_lengths, 0), (batch.lengths, len(batch.prompt_ids))):
        stops = (lengths.cumsum(0) + first).tolist()
        spans.append(list(zip([first, *stops[:-1]], stops, strict=True)) if stops else [])
    return spans[0], spans[1]
