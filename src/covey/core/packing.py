"""Cutting a batch into micro-batches of a bounded number of tokens, and dividing it evenly over ranks.

Token weights are fixed before anything is cut, so every plan has the same gradient. A completion is never cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.strands import strand_sizes

ENOUGH_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens that keep a device busy in one forward pass; more tokens take memory and gain no speed."""


class RolloutSizes(Protocol):
    """Sizes that packing reads: fields of a `TrainBatch`, or of the index of a batch that spans processes."""

    @property
    def lengths(self) -> Tensor: ...
    @property
    def groups(self) -> Tensor: ...
    @property
    def prompt_lengths(self) -> Tensor: ...
    def __len__(self) -> int: ...


Unit = list[int]  # rollouts of one group that stay together


@dataclass(frozen=True)
class ActivationRoom:
    """Memory for the activations of a micro-batch, and how many layers can keep theirs instead of recomputing them.

    The layers nearest the output keep their activations: backward begins with them and frees their memory before it
    recomputes a layer.
    """

    size: int  # bytes for the activations of a micro-batch
    recomputed: int  # bytes per token if every layer recomputes
    layer: int  # further bytes per token for each layer that keeps its activations
    layers: int  # number of layers

    def kept(self, tokens: int) -> int:
        """Number of layers that keep their activations in a micro-batch of `tokens` tokens.

        The last layer costs nothing more: backward would recompute it first, when no memory has been freed yet.

        Example:
            100 bytes for 2 tokens, 20 each in any case and 10 for a layer: 1 + (100 - 40) // 20 = 4 layers.
        """
        left = self.size - tokens * self.recomputed
        return 0 if left < 0 else min(self.layers, 1 + left // max(tokens * self.layer, 1))


def computed_tokens(batch: RolloutSizes, rows: Sequence[int], layout: str) -> int:
    """Tokens that a forward pass over the rollouts `rows` computes.

    Layout "shared_prefix" counts each prompt once, "packed" once per rollout, "padded" counts the padding as well.

    Example:
        A prompt of 4 tokens with completions of 2 and 3: shared 4 + 2 + 3 = 9, packed 6 + 7 = 13, padded 2 · 7 = 14.
    """
    return _Costs(batch, layout).of(rows)


def derived_budget(rows: int, longest: int, largest: int, device_type: str, room: int = 0) -> int:
    """Default token budget of a micro-batch: enough to keep the device busy and to hold the largest group.

    Args:
        rows: rollouts that the user asked for per micro-batch (`per_device_train_batch_size`).
        longest: tokens of the longest rollout; rows · longest bounds the budget.
        largest: tokens of the largest group.
        device_type: "cpu" or "cuda".
        room: tokens that fit into the device's memory by the memory plan, 0 if unknown. Up to this number the budget
            keeps the device busy even if `rows` is smaller.
    """
    enough = ENOUGH_TOKENS.get(device_type, ENOUGH_TOKENS["cuda"])
    return max(min(rows * longest, max(enough, largest)), min(enough, room))


def pack_micro_batches(batch: RolloutSizes, budget: int, layout: str, at_least: int = 1) -> list[Tensor]:
    """Cut a batch into micro-batches of at most `budget` tokens: the rollouts of each, [R] int64, largest first.

    Groups stay together where they fit; a rollout longer than the budget gets a micro-batch of its own. There are as
    many micro-batches as first-fit decreasing needs, but at least `at_least`, so that all ranks run equally many. Their
    sizes are balanced by giving each unit, longest first, to the micro-batch that is shortest so far (Graham 1969).
    """
    if not len(batch):
        return []
    costs = _Costs(batch, layout)
    bins = _padded_bins(costs, budget) if layout == "padded" else _packed_bins(costs, budget, at_least)
    while len(bins) < at_least and max(map(len, bins)) > 1:
        longest = max((rows for rows in bins if len(rows) > 1), key=costs.of)
        bins.remove(longest)
        bins += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    bins.sort(key=costs.of, reverse=True)
    return [torch.tensor(rows, device=batch.lengths.device) for rows in bins]


def balance_ranks(batch: RolloutSizes, ranks: int, layout: str) -> list[Tensor]:
    """Divide rollouts over ranks evenly by tokens: the rollouts of each rank, [R] int64 in order.

    A group stays together unless it has more than 1 / ranks of the tokens.
    """
    costs = _Costs(batch, "packed" if layout == "padded" else layout)
    fair = -(-costs.of(range(len(batch))) // ranks)
    shares = _even_bins(costs, costs.units(fair), ranks)
    return [torch.tensor(sorted(rows), dtype=torch.long, device=batch.lengths.device) for rows in shares]


class _Costs:
    """Counts the tokens of sets of rollouts; holds plain lists, which are faster than tensors here."""

    def __init__(self, batch: RolloutSizes, layout: str):
        self.layout = layout
        self.lengths = batch.lengths.tolist()
        self.groups = batch.groups.tolist()
        self.prompts = batch.prompt_lengths[batch.groups].tolist()
        sizes = (batch.prompt_lengths[batch.groups] + batch.lengths).cpu()
        rows = torch.stack([torch.ones_like(sizes), sizes, sizes, torch.zeros_like(sizes)], dim=1)
        strands = getattr(batch, "strands", None)  # of an index
        if isinstance(batch, TrainBatch) and batch.jumps is not None:
            strands = strand_sizes(batch)
        self.rows = (rows if strands is None else torch.where(strands[:, :1] > 0, strands, rows)).tolist()

    def of(self, rows: Sequence[int]) -> int:
        """Tokens of one forward pass over `rows`."""
        chosen = list(map(self.rows.__getitem__, rows))
        if self.layout == "padded":
            return sum(map(itemgetter(0), chosen)) * max(map(itemgetter(2), chosen), default=0)
        if self.layout == "packed":
            return sum(map(itemgetter(1), chosen))
        tokens, counted = 0, set()
        for row in rows:
            tokens += self.lengths[row] + self.rows[row][3]
            if self.groups[row] not in counted:
                tokens += self.prompts[row]
                counted.add(self.groups[row])
        return tokens

    def units(self, limit: int) -> list[Unit]:
        """Groups; a group of more than `limit` tokens is cut into as few equal parts as keep to it, if possible."""
        members: dict[int, Unit] = {}
        for row, group in enumerate(self.groups):
            members.setdefault(group, []).append(row)
        units: list[Unit] = []
        for rows in members.values():
            parts = [rows]
            while len(parts) < len(rows) and max(map(self.of, parts)) > limit:
                parts = _even_bins(self, [[row] for row in rows], len(parts) + 1)
            units += map(sorted, filter(None, parts))
        return units


def _packed_bins(costs: _Costs, budget: int, at_least: int) -> list[Unit]:
    """First-fit decreasing, evened out where that keeps to the budget."""
    units = sorted(costs.units(budget), key=costs.of, reverse=True)
    needed: list[Unit] = []
    for unit in units:
        for rows in needed:
            if costs.of([*rows, *unit]) <= budget:
                rows.extend(unit)
                break
        else:
            needed.append(list(unit))
    even = list(filter(None, _even_bins(costs, units, max(len(needed), min(at_least, len(units))))))
    for rows in even:
        if len(rows) > 1 and costs.of(rows) > budget:
            return needed
    return even


def _padded_bins(costs: _Costs, budget: int) -> list[Unit]:
    """Sequences of similar length together, so that little is padded: the longest first, as many as fit the budget."""
    order = sorted(range(len(costs.lengths)), key=lambda row: costs.of([row]), reverse=True)
    bins: list[Unit] = []
    for row in order:
        if bins and costs.of([*bins[-1], row]) <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _even_bins(costs: _Costs, units: list[Unit], count: int) -> list[Unit]:
    """Put each unit, longest first, into the bin that has the fewest tokens so far."""
    bins: list[Unit] = [[] for _ in range(count)]
    loads = [0] * count
    for unit in sorted(units, key=costs.of, reverse=True):
        shortest = loads.index(min(loads))
        bins[shortest].extend(unit)
        loads[shortest] = costs.of(bins[shortest])
    return bins
