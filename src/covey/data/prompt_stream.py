"""Endless stream of row numbers of a dataset, the same on every process, for refills and prompts by difficulty."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from covey.rollout.prompts import sample_seed


@dataclass(eq=False)
class PromptStream:
    """Epochs over a dataset, each in an order of its own.

    An epoch includes each row with its `chance` (thinning), so no row comes twice in an epoch, rows come in proportion
    to their chances in the long run, and with chances of 1 every epoch includes every row once.

    Example:
        >>> stream = PromptStream(4, seed=0, name="refill", shuffle=False)
        >>> stream.take(2, avoid={0, 1}), stream.take(3)  # avoided rows are deferred, not lost
        ([2, 3], [0, 1, 2])
    """

    rows: int
    seed: int  # of the orders, together with the number of the epoch
    name: str  # streams of the same seed and other names are independent
    _: KW_ONLY
    shuffle: bool  # a random order in each epoch, else the dataset's own
    chance: Callable[[int], float] | None = None  # row number -> its chance, above 0 and at most 1; None: every row

    def __post_init__(self) -> None:
        self._epoch = self._position = 0
        self._deferred: list[int] = []
        self._order, self._thresholds = self._shuffled()

    def take(self, count: int, avoid: AbstractSet[int] = frozenset()) -> list[int]:
        """The next rows, all different; those to `avoid` are deferred, unless too few others are left."""
        assert count <= self.rows, "a dataset fills at least one generation"
        if self.rows - len(avoid) < count:
            avoid = frozenset()
        taken = [row for row in self._deferred if row not in avoid][:count]
        self._deferred = [row for row in self._deferred if row not in taken]
        while len(taken) < count:
            row = self._next()
            if row not in avoid and row not in taken:
                taken.append(row)
            elif row not in self._deferred and row not in taken:
                self._deferred.append(row)
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "pass": self._epoch, "place": self._position, "put_off": list(self._deferred)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; ValueError if the dataset has another number of rows."""
        if state["rows"] != self.rows:
            raise ValueError(
                f"the checkpoint was made with a training dataset of {state['rows']} rows and this one has"
                f" {self.rows}: what it knows about prompts is kept by row number and would mean others. Resume with"
                " the same dataset, or begin a new run from the checkpoint's weights."
            )
        self._epoch, self._position = state["pass"], state["place"]
        self._deferred = list(state["put_off"])
        self._order, self._thresholds = self._shuffled()

    def _next(self) -> int:
        while True:
            if self._position == self.rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order, self._thresholds = self._shuffled()
            row, threshold = self._order[self._position], self._thresholds[self._position]
            self._position += 1
            if self.chance is None or threshold < self.chance(row):
                return row

    def _shuffled(self) -> tuple[list[int], list[float]]:
        """Order of this epoch, and for each position a number in [0, 1) that the row's chance must exceed."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.name, self._epoch))
        thresholds = torch.rand(self.rows, generator=generator, dtype=torch.float64)
        order = torch.randperm(self.rows, generator=generator) if self.shuffle else torch.arange(self.rows)
        return order.tolist(), thresholds.tolist()
