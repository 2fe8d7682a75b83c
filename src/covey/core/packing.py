"""Which rollouts go through the model together: passes of a bounded number of tokens, and fair shares for ranks.

Weights are fixed before anything is cut (`covey.core.weighting`), so every plan has the same gradient; plans differ in
memory and time alone. A completion is never cut. Not here: running the passes (`covey.trainer.microbatches`).

Letters: B rollouts of a batch, T tokens that the model is run on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.core.batch import TrainBatch

ENOUGH_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens with which a forward pass keeps the hardware busy; larger ones take memory and gain nothing."""

Unit = list[int]
"""Rollouts of one group that stay together."""


def pass_tokens(batch: TrainBatch, rows: Sequence[int], layout: str) -> int:
    """Tokens that a forward pass over the rollouts `rows` computes.

    Args:
        batch: where lengths and groups are looked up.
        rows: rollouts of the pass.
        layout: "shared_prefix" counts each prompt once, "packed" once for every rollout, "padded" fills every row up
            to the longest.

    Example:
        A prompt of 4 tokens with completions of 2 and 3: shared 4 + 2 + 3 = 9, packed 6 + 7 = 13, padded 2 · 7 = 14.
    """
    return _Costs(batch, layout).of(rows)


def pack_micro_batches(batch: TrainBatch, budget: int, layout: str, at_least: int = 1) -> list[Tensor]:
    """Cut a batch into forward passes of at most `budget` tokens, the largest first.

    Siblings stay together where they fit. A rollout that is longer than the budget gets a pass of its own. The number
    of passes is what first-fit decreasing needs; then they are evened out by giving each unit, longest first, to the
    shortest pass (Graham 1969).

    Args:
        batch: rollouts to train on.
        budget: most tokens of a pass.
        layout: how the tokens of a pass are counted (`pass_tokens`).
        at_least: make this many passes if there are rollouts enough, so that all ranks run equally many.

    Returns:
        The rollouts of each pass, int64 on the batch's device; every rollout is in exactly one.
    """
    if not len(batch):
        return []
    costs = _Costs(batch, layout)
    bins = _runs(costs, budget) if layout == "padded" else _packed_bins(costs, budget, at_least)
    while len(bins) < at_least and max(len(rows) for rows in bins) > 1:
        longest = max((rows for rows in bins if len(rows) > 1), key=costs.of)
        bins.remove(longest)
        bins += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    bins.sort(key=costs.of, reverse=True)
    return [torch.tensor(rows, device=batch.lengths.device) for rows in bins]


def balance_ranks(batch: TrainBatch, ranks: int, layout: str) -> list[Tensor]:
    """Share rollouts out to ranks, evenly by tokens; siblings stay together unless they are more than a fair share.

    Returns:
        The rollouts of each rank, in the batch's order; a rank may get none.
    """
    costs = _Costs(batch, "packed" if layout == "padded" else layout)
    fair = -(-costs.of(range(len(batch))) // ranks)
    shares = _even(costs, costs.units(fair), ranks)
    return [torch.tensor(sorted(rows), dtype=torch.long, device=batch.lengths.device) for rows in shares]


class _Costs:
    """Token counts of sets of rollouts, from plain lists."""

    def __init__(self, batch: TrainBatch, layout: str):
        self.layout = layout
        self.lengths = batch.lengths.tolist()
        self.groups = batch.groups.tolist()
        prompts = batch.prompt_lengths.tolist()
        self.prompts = [prompts[group] for group in self.groups]

    def of(self, rows: Sequence[int]) -> int:
        if self.layout == "padded":
            return len(rows) * max((self.prompts[r] + self.lengths[r] for r in rows), default=0)
        if self.layout == "packed":
            return sum(self.prompts[r] + self.lengths[r] for r in rows)
        return sum(self.lengths[r] for r in rows) + sum({self.groups[r]: self.prompts[r] for r in rows}.values())

    def units(self, limit: int) -> list[Unit]:
        """Groups, cut where they exceed `limit` into as few and as equal parts as keep to it, if rollouts allow."""
        members: dict[int, Unit] = {}
        for row, group in enumerate(self.groups):
            members.setdefault(group, []).append(row)
        return [part for rows in members.values() for part in self._cut(rows, limit)]

    def _cut(self, rows: Unit, limit: int) -> list[Unit]:
        parts = 1
        while True:
            cut = _even(self, [[row] for row in rows], parts)
            if parts >= len(rows) or max(self.of(part) for part in cut) <= limit:
                return [sorted(part) for part in cut if part]
            parts += 1


def _packed_bins(costs: _Costs, budget: int, at_least: int) -> list[Unit]:
    units = costs.units(budget)
    needed = _first_fit(costs, units, budget)
    even = [rows for rows in _even(costs, units, max(len(needed), min(at_least, len(units)))) if rows]
    within = all(len(rows) == 1 or costs.of(rows) <= budget for rows in even)
    return even if within else needed


def _first_fit(costs: _Costs, units: list[Unit], budget: int) -> list[Unit]:
    """Each unit, longest first, into the first bin with room for it."""
    bins: list[Unit] = []
    for unit in sorted(units, key=costs.of, reverse=True):
        room = next((rows for rows in bins if costs.of([*rows, *unit]) <= budget), None)
        if room is None:
            bins.append(list(unit))
        else:
            room.extend(unit)
    return bins


def _even(costs: _Costs, units: list[Unit], bins: int) -> list[Unit]:
    """Each unit, longest first, into the bin that is shortest so far."""
    filled: list[Unit] = [[] for _ in range(bins)]
    loads = [0] * bins
    for unit in sorted(units, key=costs.of, reverse=True):
        shortest = loads.index(min(loads))
        filled[shortest].extend(unit)
        loads[shortest] = costs.of(filled[shortest])
    return filled


def _runs(costs: _Costs, budget: int) -> list[Unit]:
    """Rows of similar length together, so that little is padded: the longest first, as many as the budget holds."""
    order = sorted(range(len(costs.lengths)), key=lambda row: costs.of([row]), reverse=True)
    runs: list[Unit] = []
    for row in order:
        if runs and costs.of([*runs[-1], row]) <= budget:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def derived_budget(rows: int, longest: int, largest: int, device_type: str) -> int:
    """Tokens of a pass where nobody says: what keeps the device busy, within the user's batch size.

    Args:
        rows: rollouts of a nominal micro-batch.
        longest: tokens of the longest rollout; `rows` of these, padded, are the most that a pass may take.
        largest: tokens of the largest group, which is not cut below that bound.
        device_type: "cpu", "cuda", ...
    """
    return min(rows * longest, max(ENOUGH_TOKENS.get(device_type, ENOUGH_TOKENS["cuda"]), largest))
