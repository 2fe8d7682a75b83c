"""Metric values that carry their reduction: a mean is a sum and a count, divided once when it is logged."""

import math
from collections.abc import Callable
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
    choose: ClassVar[Callable[..., float]] = min

    def merge(self, other: Self) -> Self:
        numbers = [number for number in (self.number, other.number) if not math.isnan(number)]
        return type(self)(self.choose(numbers, default=math.nan))


class Max(Min):
    """The largest value; NaN is left out."""

    __slots__ = ()
    reduction: ClassVar[str] = "max"
    choose: ClassVar[Callable[..., float]] = max


Stat = Mean | Min | Max | Sum


def merge_all(into: dict[str, Stat], new: dict[str, Stat]) -> dict[str, Stat]:
    """Merge `new` into `into`, name by name, in place; returns `into`."""
    for name, stat in new.items():
        into[name] = into[name].merge(stat) if name in into else stat  # type: ignore[arg-type]
    return into
