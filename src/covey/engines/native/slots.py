"""Which row of a batch belongs to which group, as tensors: each group has as many seats as the largest has rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SlotMap:
    """Valid until rows come or go.

    Attributes:
        table: [groups * seats] the row in each seat of each group; row 0 in an empty one, computed and never read.
        order: [rows] the seat of each row.
        lengths: [rows] tokens of the row's prompt.
        starts: [rows] the row's first column.
        seats: per group.
        width: tokens of the longest prompt stored.
        aligned: the seats are the rows, in order.
        uniform: nothing needs a mask: prompts as long as their storage is wide, rows of one start.
    """

    table: Tensor
    order: Tensor
    lengths: Tensor
    starts: Tensor
    seats: int
    width: int
    aligned: bool
    uniform: bool

    @classmethod
    def of(
        cls,
        owners: list[int],
        prompt_lengths: list[int],
        starts: list[int],
        width: int,
        rows: int,
        least_seats: int,
        device: torch.device,
    ) -> "SlotMap":
        """The seating of rows by their `owners` (a group each), with places for `rows` rows.

        Example:
            owners [0, 1, 0] have two seats a group: table [0, 2 | 1, 0], order [0, 2, 1].
        """
        members: list[list[int]] = [[] for _ in prompt_lengths]
        for row, group in enumerate(owners):
            members[group].append(row)
        seats = max(least_seats, *(len(some) for some in members))
        table = [row for some in members for row in some + [0] * (seats - len(some))]
        seat_of = {row: group * seats + i for group, some in enumerate(members) for i, row in enumerate(some)}
        unused = [0] * (rows - len(owners))
        order = [seat_of[row] for row in range(len(owners))] + unused
        lengths = [prompt_lengths[group] for group in owners] + unused
        return cls(
            table=torch.tensor(table, device=device),
            order=torch.tensor(order, device=device),
            lengths=torch.tensor(lengths, device=device),
            starts=torch.tensor(starts + unused, device=device),
            seats=seats,
            width=width,
            aligned=order == list(range(len(table))),
            uniform=set(prompt_lengths) == {width} and len(set(starts)) == 1,
        )

    def accepts(self, other: "SlotMap") -> bool:
        """Whether a recording made with this one can go on with the other's contents."""
        mine, its = ((x.seats, x.width, x.aligned, x.table.shape, x.order.shape) for x in (self, other))
        return mine == its

    def copy_(self, other: "SlotMap") -> None:
        """Take the other's contents."""
        for name in ("table", "order", "lengths", "starts"):
            getattr(self, name).copy_(getattr(other, name))
