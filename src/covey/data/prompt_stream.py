"""Row numbers of a dataset without end, drawn while training goes on: refills, and prompts chosen by difficulty.

Not here: the order in which the dataloader reads a dataset (`covey.data.sampler`). A stream knows no rows, only
their numbers, and is the same on every process. What it draws depends on its seed, on what was asked of it before and
on the weights at that moment; all of it is in `state_dict`. Another way to prefer prompts is another `chance`.
"""

from collections.abc import Callable, Container, Sized
from typing import Any, Protocol

import torch

from covey.rollout.prompts import sample_seed


class Avoided(Sized, Container[int], Protocol):
    """A set of row numbers."""


class PromptStream:
    """Pass after pass over a dataset, each in an order of its own.

    A pass takes a row with its `chance` and leaves it out otherwise (thinning). So no row comes twice in a pass, rows
    come as often, in the long run, as their chances say, and with chances of 1 every pass takes every row once.

    Args:
        rows: rows of the dataset.
        seed: of the orders, with the number of the pass.
        name: streams of the same seed and other names are independent.
        shuffle: a random order in each pass, else the dataset's own.
        chance: row number -> the chance, above 0 and at most 1, that a pass takes it; None takes every row.

    Example:
        >>> stream = PromptStream(4, seed=0, name="refill", shuffle=False)
        >>> stream.take(2, avoid={0, 1}), stream.take(3)  # what was avoided is put off, not lost
        ([2, 3], [0, 1, 2])
    """

    def __init__(self, rows: int, seed: int, name: str, *, shuffle: bool, chance: Callable[[int], float] | None = None):
        self.rows = rows
        self._seed = seed
        self._name = name
        self._shuffle = shuffle
        self._chance = chance
        self._pass = 0
        self._place = 0
        self._put_off: list[int] = []
        self._order, self._luck = self._shuffled()

    def take(self, count: int, avoid: Avoided = frozenset()) -> list[int]:
        """The next rows, all different.

        Args:
            count: how many; at most the rows of the dataset.
            avoid: rows not to take now. Where too few others are left they are taken all the same.
        """
        assert count <= self.rows, "a dataset fills at least one generation"
        if self.rows - len(avoid) < count:
            avoid = frozenset()
        taken = [row for row in self._put_off if row not in avoid][:count]
        self._put_off = [row for row in self._put_off if row not in taken]
        while len(taken) < count:
            row = self._next()
            if row not in avoid and row not in taken:
                taken.append(row)
            elif row not in self._put_off and row not in taken:
                self._put_off.append(row)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: plain numbers."""
        return {"rows": self.rows, "pass": self._pass, "place": self._place, "put_off": list(self._put_off)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: the dataset has another number of rows now.
        """
        if state["rows"] != self.rows:
            raise ValueError(
                f"the checkpoint was made with a training dataset of {state['rows']} rows and this one has"
                f" {self.rows}: what it knows about prompts is kept by row number and would mean others. Resume with"
                " the same dataset, or begin a new run from the checkpoint's weights."
            )
        self._pass, self._place = state["pass"], state["place"]
        self._put_off = list(state["put_off"])
        self._order, self._luck = self._shuffled()

    def _next(self) -> int:
        while True:
            if self._place == self.rows:
                self._pass, self._place = self._pass + 1, 0
                self._order, self._luck = self._shuffled()
            row, luck = self._order[self._place], self._luck[self._place]
            self._place += 1
            if self._chance is None or luck < self._chance(row):
                return row

    def _shuffled(self) -> tuple[list[int], list[float]]:
        """The order of this pass, and a number in [0, 1) for each place that its row's chance must exceed."""
        generator = torch.Generator().manual_seed(sample_seed(self._seed, self._name, self._pass))
        luck = torch.rand(self.rows, generator=generator, dtype=torch.float64)
        order = torch.randperm(self.rows, generator=generator) if self._shuffle else torch.arange(self.rows)
        return order.tolist(), luck.tolist()
