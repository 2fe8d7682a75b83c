"""Choice of prompts within a dataset: an order for every epoch, in which each row is included by its chance.

To add a sampler, write a function of `PromptFacts` and a case in `sampler_of`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.findings import CheckError
from covey.core.stats import Mean
from covey.rollout.prompts import sample_seed
from covey.runtime.import_path import resolve
from covey.runtime.user_code import format_error, place_of

NEWEST = 0.5  # weight of the newest group in a prompt's running means; high, because the policy changes between groups


class PromptFacts(NamedTuple):
    """Rewards of the rows of a dataset so far; NaN for rows not seen yet."""

    means: Tensor  # [rows] float64, running mean of the total reward
    squares: Tensor  # [rows] float64, of its square
    counts: Tensor  # [rows] int64, groups seen
    step: int  # optimizer steps before the rollout batch that is drawn


Sampler = Callable[[PromptFacts], Tensor]
"""Facts -> probabilities [rows] in (0, 1] with which an epoch includes each row."""


def by_difficulty(facts: PromptFacts, floor: float) -> Tensor:
    """chance(x) = floor + (1 - floor) · v(x) / largest v of any row, v the running variance of the reward.

    For rewards of 0 and 1, v is p (1 - p), largest for prompts of intermediate difficulty. Rows not seen yet have
    chance 1; all rows have chance 1 until the rewards of some row differ.
    """
    variances = (facts.squares - facts.means.square()).clamp(min=0.0)
    largest = variances.nan_to_num(0.0).max().item()
    if not largest > 0:
        return torch.ones_like(variances)
    return (floor + (1 - floor) * variances / largest).nan_to_num(1.0)


def by_pools(facts: PromptFacts, tops: Sequence[float], weights: Sequence[float]) -> Tensor:
    """Weight of the row's pool, divided by the largest weight; 1 for rows not seen yet.

    A row belongs to the first pool whose upper bound is at least the row's mean reward.
    """
    share = torch.tensor(weights, dtype=torch.float64) / max(weights)
    pools = torch.bucketize(facts.means.nan_to_num(0.0), torch.tensor(tops[:-1], dtype=torch.float64))
    return torch.where(facts.means.isnan(), 1.0, share[pools])


def by_function(facts: PromptFacts, function: Callable[..., Any], name: str) -> Tensor:
    try:
        chances = torch.as_tensor(function(*facts), dtype=torch.float64)
    except Exception as error:
        raise ValueError(f"the sampler {name} failed: {format_error(error)}{place_of(error)}.") from error
    if chances.shape != facts.means.shape:
        raise ValueError(f"the sampler {name} returned {list(chances.shape)} chances for {len(facts.means)} rows.")
    if wrong := (~((chances > 0) & (chances <= 1))).nonzero().flatten().tolist():
        raise ValueError(
            f"the sampler {name} gave row {wrong[0]} the chance {chances[wrong[0]].item():g}; chances are above 0 and"
            " at most 1: a row of chance 0 would never come again."
        )
    return chances


def sampler_of(given: Any, floor: float) -> Sampler | None:
    """The sampler of a setting; None for `uniform` and for orders, with which every row has chance 1."""
    if given == "difficulty":
        return partial(by_difficulty, floor=floor)
    if isinstance(given, Mapping):
        if "order" in given:
            return None
        pools = given["pools"].values()
        tops = [math.inf if top is None else float(top) for top, _ in pools]
        return partial(by_pools, tops=tops, weights=[float(weight) for _, weight in pools])
    if given == "uniform":
        return None
    function = given if callable(given) else resolve(given, "prompt_sampler")
    return partial(by_function, function=function, name=repr(getattr(function, "__name__", given)))


def order_of(given: Any, rows: Any, name: str) -> list[int] | None:
    """Row numbers sorted by the column of an order, smallest value first; None for other samplers."""
    if not (isinstance(given, Mapping) and "order" in given):
        return None
    column = given["order"]
    values = [rows[number].get(column) for number in range(len(rows))]
    missing = next((number for number, value in enumerate(values) if value is None), None)
    if missing is not None:
        evidence = f"{name} is ordered by the column {column!r}, and row {missing} has none."
        raise CheckError.of("column-order", evidence, "Fill it, or name another column.")
    try:
        return sorted(range(len(values)), key=values.__getitem__)
    except TypeError as error:
        evidence = f"{name} cannot be ordered by the column {column!r}: {error}."
        raise CheckError.of("column-order", evidence, "Give numbers, or text alone.") from error


class PromptHistory:
    """Running means of every row's total reward, and its chance by a sampler.

    For each row, m ← (1 - ½) m + ½ mean_group(R) and q ← (1 - ½) q + ½ mean_group(R²), starting with the values of the
    first group. Where steps are rewarded, R is the reward of the outcome, and the variance of step rewards within a
    group is added to the mean of R².
    """

    def __init__(self, rows: int, sampler: Sampler, floor: float | None = None):
        self.sampler, self.floor, self.step = sampler, floor, 0
        self.means = torch.full((rows,), torch.nan, dtype=torch.float64)
        """[rows] running mean reward, the pass rate for rewards of 0 and 1; NaN for prompts not seen yet."""
        self._squares = torch.full((rows,), torch.nan, dtype=torch.float64)
        self._counts = torch.zeros(rows, dtype=torch.long)
        self._chances: Tensor | None = None  # None: to be computed from the current means

    def update(self, prompts: Sequence[int], rewards_PG: Tensor, variances_P: Tensor) -> None:
        """Add the groups of `prompts`, by row number; NaN is no reward, and groups without any reward are skipped."""
        for row, rewards, of_steps in zip(prompts, rewards_PG.double(), variances_P.double(), strict=True):
            scored = rewards[~rewards.isnan()]
            if not len(scored):
                if of_steps.isnan():
                    continue
                scored = torch.zeros(1, dtype=torch.float64)
            square = scored.square().mean() + of_steps.nan_to_num(0.0)
            newest = NEWEST if self.seen(row) else 1.0
            for running, value in ((self.means, scored.mean()), (self._squares, square)):
                running[row] = newest * value + ((1 - newest) * running[row] if newest < 1 else 0.0)
            self._counts[row] += 1
        self._chances = None

    def at_step(self, step: int) -> None:
        """Use the chances for this optimizer step from now on."""
        if step != self.step:
            self.step, self._chances = step, None

    def seen(self, row: int) -> bool:
        return not bool(self.means[row].isnan())

    def chance(self, row: int) -> float:
        return self.chances[row].item()

    @property
    def chances(self) -> Tensor:
        if self._chances is None:
            self._chances = self.sampler(PromptFacts(self.means, self._squares, self._counts, self.step))
        return self._chances

    def stats(self) -> dict[str, Mean]:
        chances = self.chances[~self.means.isnan()]
        least = self.chances.min().item() if self.floor is None else self.floor
        return {
            "seen_fraction": Mean(len(chances), len(self.means)),
            "chance": Mean(chances.sum().item(), len(chances)),
            "settled_fraction": Mean((chances <= least + 1e-9).sum().item(), len(chances)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means.clone(), "squares": self._squares.clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self._squares = state["means"].clone(), state["squares"].clone()
        seen = (~self.means.isnan()).long()  # a checkpoint of version 0.2 does not count
        self._counts = state.get("counts", seen).clone()
        self._chances = None


@dataclass(eq=False)
class PromptStream:
    """Epochs over a dataset, each in an order of its own.

    An epoch includes each row with probability `chance` (thinning). So no row is drawn twice in an epoch, rows are
    drawn in proportion to their chances in the long run, and with chances of 1 every epoch has every row once.

    Example:
        >>> stream = PromptStream(4, seed=0, name="refill", shuffle=False)
        >>> stream.take(2, avoid={0, 1}), stream.take(3)  # avoided rows are deferred, not lost
        ([2, 3], [0, 1, 2])
    """

    rows: int
    seed: int  # of the orders, with the number of the epoch
    name: str  # streams with one seed and different names are independent
    _: KW_ONLY
    shuffle: bool  # a random order in each epoch, else the dataset's own
    chance: Callable[[int], float] | None = None  # row number -> its chance, above 0 and at most 1; None: every row
    order: Sequence[int] | None = None  # order of every epoch, instead of the dataset's or a random one

    def __post_init__(self) -> None:
        self._deferred: list[int] = []
        self._begin(0)

    def take(self, count: int, avoid: AbstractSet[int] = frozenset()) -> list[int]:
        """The next `count` rows, all different; rows in `avoid` are deferred, unless too few others are left."""
        assert count <= self.rows, "a dataset fills at least one rollout batch"
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

    @property
    def epochs(self) -> float:
        """Epochs so far, with fractions."""
        return self._epoch + self._position / self.rows

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
        self._deferred = list(state["put_off"])
        self._begin(state["pass"], state["place"])

    def _next(self) -> int:
        while True:
            if self._position == self.rows:
                self._begin(self._epoch + 1)
            row, threshold = self._order[self._position], self._thresholds[self._position]
            self._position += 1
            if self.chance is None or threshold < self.chance(row):
                return row

    def _begin(self, epoch: int, position: int = 0) -> None:
        """Draw the order of an epoch, and a number in [0, 1) per position: a row with a larger chance is included."""
        self._epoch, self._position = epoch, position
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.name, epoch))
        self._thresholds = torch.rand(self.rows, generator=generator, dtype=torch.float64).tolist()
        order = torch.randperm(self.rows, generator=generator) if self.shuffle else torch.arange(self.rows)
        self._order = order.tolist() if self.order is None else list(self.order)
