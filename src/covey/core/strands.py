"""Strands: rollouts whose tokens form a tree, for programs that rewrite their history or hold several conversations.

`Rollout.completion_ids` holds each token of the tree once, one strand's own tokens after another's. A strand continues
any earlier token of the prompt or the completion, or starts without context. Only forward passes read strands; all
other code sees one sequence.

Example:
    A rollout with the prompt [1, 2] answers [3, 4], and then [5] to the prompt [1, 9], which shares its first token:

    >>> from covey.core.batch import collate
    >>> from covey.core.records import FinishReason, Rollout
    >>> sampled = [True, True, False, True]
    >>> rollout = Rollout([1, 2], [3, 4, 9, 5], sampled, None, "", FinishReason.STOP, strands=[(2, 0)])
    >>> rows, owners, tokens = unfolded(collate([rollout]))
    >>> [prompt.tolist() for prompt in rows.prompts()], [row.tolist() for row in rows.completions()]
    ([[1, 2], [1]], [[3, 4], [9, 5]])
    >>> rows.sampled.tolist(), owners.tolist(), tokens.tolist()
    ([True, True, False, True], [0, 0], [0, 1, 2, 3])
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, distinct_prompts, segment_sum

Strands = Sequence[tuple[int, int]]
"""Strands after the first: the index of the first token among `completion_ids`, and the index of the token that it
follows, counted over prompt and completion; -1 for none."""


def paths(prompt: int, completion: int, strands: Strands) -> list[tuple[int, list[range]]]:
    """The path of each strand from its root: a number of prompt tokens, and ranges of completion tokens, own ones last.

    If a strand follows nothing, token i of the completion takes the place of the prompt, and the number is -1 - i.
    """
    found: list[tuple[int, list[range]]] = []
    starts = [0, *(start for start, _ in strands)]
    follows = dict(strands)
    for start, stop in pairwise([*starts, completion]):
        last = follows.get(start, prompt - 1) if start else prompt - 1
        if last < 0:
            found.append((-1 - start, [range(start + 1, stop)]))
        elif last < prompt:
            found.append((last + 1, [range(start, stop)]))
        else:
            context, path = found[bisect_right(starts, last - prompt) - 1]
            found.append((context, [*path[:-1], range(path[-1].start, last - prompt + 1), range(start, stop)]))
    return found


def _size(context: int, path: list[range]) -> int:
    return max(context, 1) + sum(map(len, path))


def longest(prompt: int, completion: int, strands: Strands) -> int:
    """Tokens of the longest strand, prompt included."""
    return max(starmap(_size, paths(prompt, completion, strands)))


def strand_sizes(batch: TrainBatch) -> Tensor:
    """[B, 4] int64 per rollout: rows in `unfolded`, tokens of these rows, tokens of the longest row, and tokens of the
    distinct prompts of its rows beyond those of the first row's prompt.
    """
    sizes = []
    for _, found in _each(batch):
        rows, prompts = list(starmap(_size, found)), {context for context, _ in found if context > 0}
        sizes.append([len(rows), sum(rows), max(rows), sum(prompts) - found[0][0]])
    return torch.tensor(sizes, dtype=torch.long).view(-1, 4)


def _each(batch: TrainBatch) -> Iterator[tuple[int, list[tuple[int, list[range]]]]]:
    """The first completion token of each rollout, and its `paths`."""
    assert batch.jumps is not None, "the batch has strands"
    jumps, begin = batch.jumps.tolist(), 0
    for prompt, length in zip(batch.prompt_lengths[batch.groups].tolist(), batch.lengths.tolist(), strict=True):
        moved = [start for start in range(1, length) if jumps[begin + start]]
        yield begin, paths(prompt, length, [(start, prompt + start - 1 + jumps[begin + start]) for start in moved])
        begin += length


def unfolded(batch: TrainBatch) -> tuple[TrainBatch, Tensor, Tensor]:
    """A batch with one row per strand, the rollout of each row [R], and the index in `batch` of each token of the rows.

    A row repeats the tokens that it shares with earlier rows. Each token that the loss reads (`TrainBatch.scored`) is
    `sampled` in exactly one row, so that the sampled tokens of all rows are those of the rollouts, in the same order.
    """
    device = batch.lengths.device
    firsts, owners, lengths, source, own = list[tuple[int, ...]](), list[int](), list[int](), list[int](), list[bool]()
    tokens, given = batch.token_ids.tolist(), [tuple(prompt.tolist()) for prompt in batch.prompts()]
    of_prompts, routes = batch.routes_of_prompts(), list[Tensor]()
    for rollout, (group, (begin, found)) in enumerate(zip(batch.groups.tolist(), _each(batch), strict=True)):
        for context, path in found:
            alone = begin - 1 - context  # the token that stands for the prompt, where there is none
            firsts.append(given[group][:context] if context >= 0 else (tokens[alone],))
            if batch.routes is not None:
                routes.append(of_prompts[group][:context] if context >= 0 else batch.routes[alone : alone + 1])
            owners.append(rollout)
            source += [begin + index for part in path for index in part]
            own += [False] * sum(map(len, path[:-1])) + [True] * len(path[-1])
            lengths.append(sum(map(len, path)))
    taken = torch.tensor(source, dtype=torch.long, device=device)
    rows = TrainBatch(
        **{**batch.of_tokens(("token_ids", "kept_counts", "routes"), taken), "term_tokens": {}},
        **distinct_prompts(firsts, device, routes if batch.routes is not None else None),
        lengths=torch.tensor(lengths, dtype=torch.long, device=device),
        sampled=batch.scored[taken] & torch.tensor(own, dtype=torch.bool, device=device),
        media=None if batch.media is None else [batch.media[owner] for owner in owners],
    )
    return rows, torch.tensor(owners, dtype=torch.long, device=device), taken


def even_shares(batch: TrainBatch, *, turns: bool, tokens: Tensor | None = None) -> Tensor:
    """[N] factors of token weights that give each strand, or each turn, the same share of its rollout's weight.

    The factor is |o| / (parts · |part|) in a rollout of |o| trained tokens, so the rollout's weight does not change. A
    turn is a run of consecutive trained tokens. `tokens` [N] bool is the mask of the tokens that count as trained, by
    default `batch.sampled`.

    Example:
        Turns of one token and of three have half of the weight each:

        >>> from covey.core.batch import collate
        >>> from covey.core.records import FinishReason, Rollout
        >>> sampled = [True, False, True, True, True]
        >>> batch = collate([Rollout([1], [5, 6, 7, 8, 9], sampled, None, "", FinishReason.STOP)])
        >>> even_shares(batch, turns=True).tolist()
        [2.0, 0.0, 0.6666666865348816, 0.6666666865348816, 0.6666666865348816]
    """
    tokens = batch.sampled if tokens is None else tokens
    owners = torch.repeat_interleave(torch.arange(len(batch), device=batch.lengths.device), batch.lengths)
    begins = owners.diff(prepend=owners.new_tensor([-1])) != 0
    if batch.jumps is not None:
        begins |= batch.jumps != 0
    if turns:
        before = torch.cat([tokens.new_zeros(1), tokens])[:-1]
        begins |= tokens & ~before
    parts, trained = begins.cumsum(0) - 1, tokens.float()
    sizes = torch.zeros(int(begins.sum()), device=trained.device).index_add(0, parts, trained)
    filled = (begins & (sizes[parts] > 0)).float()
    counts = torch.zeros(len(batch), device=trained.device).index_add(0, owners, filled)
    lengths = segment_sum(tokens.long(), batch.lengths)
    return torch.where(tokens, lengths[owners] / (counts[owners] * sizes[parts]), 0.0)
