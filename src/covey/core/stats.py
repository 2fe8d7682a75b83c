"""Metric values that carry their reduction: a mean is a sum and a count, divided once when it is logged."""

import math
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean; NaN is left out."""

    total: float
    count: float
    reduction: ClassVar[str] = "mean"

    @classmethod
    def of(cls, values: list[float]) -> "Mean":
        numbers = [float(value) for value in values if not math.isnan(value)]
        return cls(sum(numbers), len(numbers))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over the window and the ranks."""

    number: float
    reduction: ClassVar[str] = "sum"

    def merge(self, other: Self) -> Self:
        return type(self)(self.number + other.number)

    def value(self) -> float:
        return self.number


class Min(Sum):
    """The smallest value; NaN is left out."""

    __slots__ = ()
    reduction: ClassVar[str] = "min"

    def merge(self, other: Self) -> Self:
        return type(self)(_extreme(min, self.number, other.number))


class Max(Sum):
    """The largest value; NaN is left out."""

    __slots__ = ()
    reduction: ClassVar[str] = "max"

    def merge(self, other: Self) -> Self:
        return type(self)(_extreme(max, self.number, other.number))


Stat = Mean | Min | Max | Sum


def _extreme(choose, a: float, b: float) -> float:
    return choose((number for number in (a, b) if not math.isnan(number)), default=math.nan)


def merge_all(into: dict[str, Stat], new: dict[str, Stat]) -> dict[str, Stat]:
    """Merge `new` into `into`, name by name, in place; returns `into`."""
    for name, stat in new.items():
        into[name] = into[name].merge(stat) if name in into else stat  # type: ignore[arg-type]
    return into
