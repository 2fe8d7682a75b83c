"""Strands: rollouts whose tokens form a tree, for programs that rewrite their history or hold several conversations.

`Rollout.completion_ids` holds the tokens of the tree, each once and a strand's own after the other's. A strand begins
after any earlier token of the prompt or the completion, or after none. Everything but a forward pass sees one sequence.

Example:
    A rollout with the prompt [1, 2] answers [3, 4], and then [5] to the prompt [1, 9], which shares its first token:

    >>> from covey.core.batch import collate
    >>> from covey.core.records import FinishReason, Rollout
    >>> sampled = [True, True, False, True]
    >>> rollout = Rollout([1, 2], [3, 4, 9, 5], sampled, None, "", FinishReason.STOP, strands=[(2, 0)])
    >>> rows, owners = unfolded(collate([rollout]))
    >>> [prompt.tolist() for prompt in rows.prompts()], [row.tolist() for row in rows.completions()]
    ([[1, 2], [1]], [[3, 4], [9, 5]])
    >>> rows.sampled.tolist(), owners.tolist()
    ([True, True, False, True], [0, 0])
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, token_index

Strands = Sequence[tuple[int, int]]
"""Strands after the first: the index of the first token among `completion_ids`, and the index of the token that it
follows, counted over prompt and completion; -1 for none."""


def paths(prompt: int, completion: int, strands: Strands) -> list[tuple[int, list[int], int]]:
    """Each strand from its beginning to its end: prompt tokens, indexes of completion tokens, and own ones at the end.

    A strand that follows nothing has -1 - i prompt tokens: token i of the completion stands for the prompt.
    """
    found: list[tuple[int, list[int], int]] = []
    starts = [0, *(start for start, _ in strands)]
    follows = dict(strands)
    for start, stop in pairwise([*starts, completion]):
        last = follows.get(start, prompt - 1) if start else prompt - 1
        before: list[int] = []
        if last < 0:
            context, start = -1 - start, start + 1
        elif last < prompt:
            context = last + 1
        else:
            strand = bisect_right(starts, last - prompt) - 1
            context, path, _ = found[strand]
            before = path[: len(path) - ([*starts, completion][strand + 1] - (last - prompt)) + 1]
        found.append((context, [*before, *range(start, stop)], stop - start))
    return found


def longest(prompt: int, completion: int, strands: Strands) -> int:
    """Tokens of the longest strand, prompt included."""
    return max((max(context, 1) + len(path)) for context, path, _ in paths(prompt, completion, strands))


def unfolded(batch: TrainBatch) -> tuple[TrainBatch, Tensor]:
    """A batch with one row per strand, and the rollout of each row [R].

    A row repeats the tokens it shares with earlier ones, and each sampled token is `sampled` in one row alone: the
    sampled tokens of the rows are those of the rollouts, in the same order.
    """
    assert batch.jumps is not None, "the batch has strands"
    device = batch.lengths.device
    prompts: dict[tuple[int, ...], int] = {}
    groups, owners, lengths, source, own = list[int](), list[int](), list[int](), list[int](), list[bool]()
    tokens, given = batch.token_ids.tolist(), [tuple(prompt.tolist()) for prompt in batch.prompts()]
    jumps, begin = batch.jumps.tolist(), 0
    for rollout, (length, group) in enumerate(zip(batch.lengths.tolist(), batch.groups.tolist(), strict=True)):
        prompt = given[group]
        moved = [start for start in range(1, length) if jumps[begin + start]]
        strands = [(start, len(prompt) + start - 1 + jumps[begin + start]) for start in moved]
        for context, path, fresh in paths(len(prompt), length, strands):
            first = prompt[:context] if context >= 0 else (tokens[begin - 1 - context],)
            groups.append(prompts.setdefault(first, len(prompts)))
            owners.append(rollout)
            lengths.append(len(path))
            source += [begin + index for index in path]
            own += [False] * (len(path) - fresh) + [True] * fresh
        begin += length
    taken = torch.tensor(source, dtype=torch.long, device=device)
    kept, counts = batch.kept_ids, batch.kept_counts
    if kept is not None and counts is not None:
        kept = kept[token_index(taken, counts)]
    rows = TrainBatch(
        token_ids=batch.token_ids[taken],
        lengths=torch.tensor(lengths, dtype=torch.long, device=device),
        sampled=batch.sampled[taken] & torch.tensor(own, dtype=torch.bool, device=device),
        prompt_ids=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.long, device=device),
        prompt_lengths=torch.tensor(list(map(len, prompts)), dtype=torch.long, device=device),
        groups=torch.tensor(groups, dtype=torch.long, device=device),
        kept_counts=None if counts is None else counts[taken],
        kept_ids=kept,
        media=None if batch.media is None else [batch.media[owner] for owner in owners],
    )
    return rows, torch.tensor(owners, dtype=torch.long, device=device)
