"""Metric values that carry their reduction.

A mean is a sum and a count, divided once at the end, so that it is right over uneven micro-batches, ranks and logging
windows. Every statistic is a small immutable value with `merge` and `value`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean. `Mean.of(values)` counts each value once; NaN is left out."""

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
class Min:
    """The smallest value seen; NaN is left out."""

    smallest: float

    reduction: ClassVar[str] = "min"

    def merge(self, other: "Min") -> "Min":
        return Min(_extreme(min, self.smallest, other.smallest))

    def value(self) -> float:
        return self.smallest


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; NaN is left out."""

    largest: float

    reduction: ClassVar[str] = "max"

    def merge(self, other: "Max") -> "Max":
        return Max(_extreme(max, self.largest, other.largest))

    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over the window and the ranks."""

    total: float

    reduction: ClassVar[str] = "sum"

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


Stat = Mean | Min | Max | Sum


def _extreme(choose, a: float, b: float) -> float:
    if math.isnan(a):
        return b
    return a if math.isnan(b) else choose(a, b)


def merge_all(into: dict[str, Stat], new: dict[str, Stat]) -> dict[str, Stat]:
    """Merge `new` into `into`, name by name, in place; returns `into`."""
    for name, stat in new.items():
        into[name] = into[name].merge(stat) if name in into else stat  # type: ignore[arg-type]
    return into
