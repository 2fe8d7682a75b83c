"""Metrics of a run: collected as statistics, merged over micro-batches and processes, divided once when logged.

`MetricLog` is the store; `generation_stats` computes the metrics of a rollout batch. Metrics of the loss come
from `covey.core.objective`. A further metric is one more name in the dictionary given to `MetricLog.add`.

Letters: N rollouts of all processes, F reward functions, P prompts, G rollouts per prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import nanstd, weighted_total
from covey.core.records import Max, Mean, Min, Stat, Sum, merge_all

ZERO_WHEN_EMPTY = tuple(f"completions/{which}_terminated_length" for which in ("mean", "min", "max"))
"""Logged as 0 where a window has no value, so that the columns exist from the first log on."""

_KINDS: dict[str, type] = {kind.reduction: kind for kind in (Mean, Min, Max, Sum)}


class MetricLog:
    """Statistics by mode ("train", "eval"), reduced over processes when drained.

    Args:
        gather: called with this process's object, returns one such object per process in the order of ranks; it must be
            called by all processes together. None for a single process.

    Example:
        >>> log = MetricLog()
        >>> log.add({"reward": Mean.of([1.0, 0.0])})
        >>> log.add({"reward": Mean.of([1.0])})
        >>> log.set("num_tokens", 96)
        >>> log.drain("train")
        {'reward': 0.6666666666666666, 'num_tokens': 96}
        >>> log.drain("train")
        {'num_tokens': 96}
    """

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None):
        self._gather = gather or (lambda mine: [mine])
        self._stats: dict[str, dict[str, Stat]] = {}
        self._assigned: dict[str, dict[str, float]] = {}

    def add(self, stats: dict[str, Stat], mode: str = "train") -> None:
        """Merge statistics of this process into the current window."""
        merge_all(self._stats.setdefault(mode, {}), stats)

    def set(self, name: str, value: float, mode: str = "train") -> None:
        """Assign a value that is logged as it is (a running total, say) until it is set again.

        All processes are expected to assign the same value; the first process's is logged.
        """
        self._assigned.setdefault(mode, {})[name] = value

    def drain(self, mode: str, prefix: str = "") -> dict[str, float]:
        """End a window: the values of all processes together, and an empty window after.

        Collective: every process must call it, but not every process needs to hold the same names.

        Args:
            mode: which window.
            prefix: put before every name.

        Returns:
            Values by name, without NaN, except for `ZERO_WHEN_EMPTY`.
        """
        merged: dict[str, Stat] = {}
        assigned: dict[str, float] = {}
        for stats, values in self._gather((self._stats.pop(mode, {}), self._assigned.get(mode, {}))):
            merge_all(merged, stats)
            assigned = {**values, **assigned}
        result = {}
        for name, value in [*((name, stat.value()) for name, stat in merged.items()), *assigned.items()]:
            if not math.isnan(value):
                result[prefix + name] = value
            elif name in ZERO_WHEN_EMPTY:
                result[prefix + name] = 0.0
        return result

    def state_dict(self) -> dict[str, Any]:
        """This process's open windows, as plain lists and numbers."""
        windows = {
            mode: {name: [stat.reduction, *astuple(stat)] for name, stat in stats.items()}
            for mode, stats in self._stats.items()
        }
        return {"windows": windows, "assigned": {mode: dict(values) for mode, values in self._assigned.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows of `state_dict`."""
        self._stats = {
            mode: {name: _KINDS[kind](*fields) for name, (kind, *fields) in stats.items()}
            for mode, stats in state["windows"].items()
        }
        self._assigned = {mode: dict(values) for mode, values in state["assigned"].items()}


def generation_stats(
    *,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    rewards_NF: Tensor,
    weights_F: Tensor,
    names: Sequence[str],
    num_generations: int,
) -> dict[str, Stat]:
    """Metrics of a rollout batch.

    The arguments describe the rollouts of all processes. Every process may add the result to its own log: merging them
    gives the same values as one process.

    Args:
        lengths: sampled tokens of each rollout.
        truncated: true for rollouts that were cut off.
        rewards_NF: [N, F] unweighted rewards, NaN where a function abstained.
        weights_F: [F] their weights.
        names: [F] names of the reward functions.
        num_generations: G; rollouts of a group are consecutive, and G divides N.

    Example:
        >>> stats = generation_stats(
        ...     lengths=[3, 5], truncated=[False, True], rewards_NF=torch.tensor([[1.0], [0.0]]),
        ...     weights_F=torch.ones(1), names=["right"], num_generations=2,
        ... )
        >>> stats["completions/mean_length"].value(), stats["reward"].value(), stats["frac_reward_zero_std"].value()
        (4.0, 0.5, 0.0)
    """
    rewards_NF = rewards_NF.double()
    total_N = weighted_total(rewards_NF, weights_F.double())
    stats = _length_stats(lengths, truncated)
    for index, name in enumerate(names):
        column = rewards_NF[:, index]
        for spelling in ("rewards", "reward"):  # existing scripts read the first, the documentation has the second
            stats[f"{spelling}/{name}/mean"] = Mean.of(column.tolist())
            stats[f"{spelling}/{name}/std"] = Mean.of([_deviation(column)])
    stats["reward"] = Mean.of(total_N.tolist())
    stats["reward_std"] = Mean.of([_deviation(total_N)])
    spread_P = nanstd(total_N.view(-1, num_generations), dim=1).flatten()
    stats["frac_reward_zero_std"] = Mean.of((spread_P == 0).double().tolist())
    return stats


def _length_stats(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, Stat]:
    terminated = [length for length, cut in zip(lengths, truncated, strict=True) if not cut]
    stats: dict[str, Stat] = {"completions/clipped_ratio": Mean.of([float(cut) for cut in truncated])}
    for suffix, values in (("length", lengths), ("terminated_length", terminated)):
        stats[f"completions/mean_{suffix}"] = Mean(float(sum(values)), len(values))
        stats[f"completions/min_{suffix}"] = Min(float(min(values, default=math.nan)))
        stats[f"completions/max_{suffix}"] = Max(float(max(values, default=math.nan)))
    return stats


def _deviation(values_N: Tensor) -> float:
    """Unbiased standard deviation of the scorable values; NaN if there are none."""
    return math.nan if bool(torch.isnan(values_N).all()) else nanstd(values_N, dim=0).item()
