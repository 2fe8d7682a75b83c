"""One copy of a prompt for all its completions: `[prompt | completion 1 | ... | completion G]`, group after group.

Every completion's positions go on where the prompt ends, and it attends to the prompt and to itself. Instead of
G (P + R) tokens a group costs P + G R, exactly. Completions that begin alike (turns they have in common, duplicates)
branch off where they part, so what they share is computed once as well.

Needs what the packed layout needs; the scorer checks it likewise.
"""

from collections.abc import Sequence
from itertools import pairwise, takewhile

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs, Segment, completion_spans, one_row, prompt_spans

WORTH_SHARING = 8
"""Tokens that completions must have in common to branch off later: each branching costs attention two more calls."""


def shared_prefix(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row, a tree for each group.

    The first token of every completion is predicted by the same state, that of the prompt's last token; so is the first
    token of every branch by the last state that its branches share.
    """
    members: list[list[int]] = [[] for _ in range(len(batch.prompt_lengths))]
    for rollout, group in enumerate(batch.groups.tolist()):
        members[group].append(rollout)
    forest = _Forest(batch)
    for prompt, rollouts in zip(prompt_spans(batch), members, strict=True):
        root = forest.add((prompt,), -1, rollouts)
        forest.grow(rollouts, 0, root)
    return one_row(batch, forest.segments, forest.paths)


class _Forest:
    """The segments found so far, in depth-first order, and each rollout's way through them."""

    def __init__(self, batch: TrainBatch):
        self.spans = completion_spans(batch)
        self.tokens = [completion.tolist() for completion in batch.completions()]
        self.segments: list[Segment] = []
        self.paths: list[list[int]] = [[] for _ in self.spans]

    def add(self, pieces: tuple[tuple[int, int], ...], parent: int, rollouts: list[int]) -> int:
        """A segment that these rollouts pass through; returns its number."""
        place = len(self.segments)
        self.segments.append(Segment(pieces, parent))
        for rollout in rollouts:
            self.paths[rollout].append(place)
        return place

    def grow(self, rollouts: list[int], done: int, parent: int) -> None:
        """Add what follows the first `done` tokens, which all these rollouts have in common."""
        for alike in self._clusters(rollouts, done):
            first = self.spans[alike[0]][0]
            # They are sorted, so what the first and the last have in common, all have.
            shared = in_common(self.tokens[alike[0]], self.tokens[alike[-1]])
            if shared > done:
                branch = self.add(((first + done, first + shared),), parent, alike)
                if len(alike) > 1:
                    self.grow(alike, shared, branch)

    def _clusters(self, rollouts: list[int], done: int) -> list[list[int]]:
        """Rollouts whose next tokens are worth sharing stand together, sorted by tokens; the others alone."""
        longer = [rollout for rollout in rollouts if len(self.tokens[rollout]) > done]
        order = sorted(longer, key=self.tokens.__getitem__)
        clusters = [order[:1]] if order else []
        for before, rollout in pairwise(order):
            wanted = slice(done, done + WORTH_SHARING)
            mine = self.tokens[rollout][wanted]
            if len(mine) == WORTH_SHARING and mine == self.tokens[before][wanted]:
                clusters[-1].append(rollout)
            else:
                clusters.append([rollout])
        return clusters


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike: `[1, 2, 3], [1, 2, 4, 5] -> 2`."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
