"""Metric values that carry their reduction: a mean is a sum and a count, divided once when it is logged.

Their numbers may be scalar tensors, so that computing them does not wait for a GPU; `read` reads many at once.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

Number = float | Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean; NaN is left out."""

    total: Number
    count: Number
    reduction: ClassVar[str] = "mean"

    @classmethod
    def of(cls, values: list[float]) -> "Mean":
        numbers = [float(value) for value in values if not math.isnan(value)]
        return cls(sum(numbers), len(numbers))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(_plain(self.total) + _plain(other.total), _plain(self.count) + _plain(other.count))

    def value(self) -> float:
        count = _plain(self.count)
        return _plain(self.total) / count if count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over all ranks, and over the optimizer steps between two log entries."""

    number: Number
    reduction: ClassVar[str] = "sum"

    def merge(self, other: Self) -> Self:
        return type(self)(_plain(self.number) + _plain(other.number))

    def value(self) -> float:
        return _plain(self.number)


class Min(Sum):
    """The smallest value; NaN is left out."""

    __slots__ = ()
    reduction: ClassVar[str] = "min"

    def merge(self, other: Self) -> Self:
        return type(self)(_extreme(min, _plain(self.number), _plain(other.number)))


class Max(Sum):
    """The largest value; NaN is left out."""

    __slots__ = ()
    reduction: ClassVar[str] = "max"

    def merge(self, other: Self) -> Self:
        return type(self)(_extreme(max, _plain(self.number), _plain(other.number)))


Stat = Mean | Min | Max | Sum


def _plain(number: Number) -> float:
    return number.item() if isinstance(number, Tensor) else number


def on_device(stats: dict[str, Stat]) -> bool:
    """True if any number is a tensor."""
    return any(isinstance(number, Tensor) for stat in stats.values() for number in _numbers(stat))


def read(several: Sequence[dict[str, Stat]]) -> list[dict[str, Stat]]:
    """Copies with plain numbers in place of tensors; tensors of one dtype and device are read in one transfer."""
    tensors: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = defaultdict(dict)
    for stats in several:
        for stat in stats.values():
            for number in _numbers(stat):
                if isinstance(number, Tensor):
                    tensors[number.dtype, number.device][id(number)] = number
    known = {
        key: value
        for group in tensors.values()
        for key, value in zip(group, torch.stack(list(group.values())).tolist(), strict=True)
    }
    return [
        {name: type(stat)(*(known.get(id(one), one) for one in _numbers(stat))) for name, stat in stats.items()}
        for stats in several
    ]


def _numbers(stat: Stat) -> tuple[Number, ...]:
    return (stat.total, stat.count) if isinstance(stat, Mean) else (stat.number,)


def _extreme(choose, a: float, b: float) -> float:
    return choose((number for number in (a, b) if not math.isnan(number)), default=math.nan)


def merge_all(into: dict[str, Stat], new: dict[str, Stat]) -> dict[str, Stat]:
    """Merge `new` into `into`, name by name, in place; returns `into`."""
    for name, stat in new.items():
        into[name] = into[name].merge(stat) if name in into else stat  # type: ignore[arg-type]
    return into
