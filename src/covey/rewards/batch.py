"""Arguments of reward functions: samples, dataset columns, and two functions to log with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.rewards.errors import RewardError, describe_sample
from covey.runtime.user_code import ATOMS

RESERVED = frozenset({"prompts", "completions", "completions_ids", "trainer_state", "log_extra", "log_metric"})
"""Arguments of every reward function, whose names dataset columns must not have."""

NOT_FORWARDED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that the arguments above replace."""


@dataclass(frozen=True)
class RewardContext:
    """Arguments of reward functions in addition to the samples.

    Attributes:
        trainer_state: the transformers `TrainerState`, or None outside training.
        log_extra: `log_extra(column, values)`, one value per sample: adds a column to the completions table.
        log_metric: `log_metric(name, value)`: logs a number.
    """

    trainer_state: Any
    log_extra: Callable[[str, list], None]
    log_metric: Callable[[str, float], None]


@dataclass(frozen=True)
class RewardBatch:
    """Samples to score. `rows[i]` is the dataset row of `rollouts[i]`, repeated for every completion of its group."""

    rows: list[dict[str, Any]]
    rollouts: list[Rollout]

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def scorable(self) -> list[int]:
        """Indices of the rollouts that did not fail; one that failed says nothing about the policy."""
        return [index for index, rollout in enumerate(self.rollouts) if rollout.finish is not FinishReason.ERROR]

    def take(self, indices: list[int]) -> "RewardBatch":
        """The batch of some samples."""
        if len(indices) == len(self.rollouts):
            return self
        return RewardBatch([self.rows[index] for index in indices], [self.rollouts[index] for index in indices])

    def describe(self, index: int) -> str:
        """Prompt and completion of a sample, shortened, for messages."""
        return describe_sample(self.rollouts[index].asked(self.rows[index]), self.rollouts[index].completion)

    @cached_property
    def arguments(self) -> dict[str, list]:
        """Keyword arguments: samples, dataset columns and rollout extras, each a list with one element per sample.

        An extra takes precedence over a dataset column of the same name, because it belongs to this episode. A value
        that a row or a rollout lacks is None.

        Raises:
            RewardError: a column or an extra has a reserved name.
        """
        columns: dict[str, list] = {}
        for records in (self.rows, [rollout.extras for rollout in self.rollouts]):
            found: dict[str, list] = {}
            for index, record in enumerate(records):
                for name, value in record.items():
                    if name not in found and name not in NOT_FORWARDED:
                        found[name] = [None] * len(records)
                    if name in found:
                        found[name][index] = value
            columns |= found
        refuse_reserved(columns)
        prompts, completions, completion_ids = [], [], []
        for row, rollout in zip(self.rows, self.rollouts, strict=True):
            prompts.append(rollout.asked(row))
            completions.append(rollout.completion)
            completion_ids.append(rollout.completion_ids)
        arguments = {"prompts": prompts, "completions": completions}
        return {**columns, **arguments, "completion_ids": completion_ids, "completions_ids": completion_ids}


def refuse_reserved(columns: Iterable[str]) -> None:
    """Raise for a column that would hide an argument.

    Raises:
        RewardError: a column has a reserved name.
    """
    taken = sorted(RESERVED.intersection(columns))
    if taken:
        raise RewardError(
            f"column {taken[0]!r} has the name of an argument that every reward function receives "
            f"({', '.join(sorted(RESERVED))}); rename it, with `dataset.rename_column` for instance."
        )


def _loggable(value: Any) -> Any:
    """Value of a logged column: plain data copied, numbers of numpy and torch as numbers, the rest as text.

    Runs under the deadline of the function that logs, since the value's `__str__` may be slow or broken.
    """
    if type(value) in (list, tuple):
        return [_loggable(one) for one in value]
    if type(value) is dict:
        return {str(name): _loggable(one) for name, one in value.items()}
    if type(value) in ATOMS:
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return str.__str__(str(value))


@dataclass
class Log:
    """Log of one call of a reward function, passed on when the call has succeeded.

    Attributes:
        size: samples of the call, the length that logged columns must have.
    """

    size: int
    extras: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: list) -> None:
        """Log a column, one value per sample: the argument `log_extra` of reward functions.

        Raises:
            RewardError: not one value per sample.
        """
        values = list(values)
        if len(values) != self.size:
            raise RewardError(f"log_extra({column!r}, ...) was given {len(values)} values for {self.size} samples.")
        self.extras[str(column)] = [_loggable(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number: the argument `log_metric` of reward functions."""
        self.metrics.append((str(name), float(value)))

    def replay(self, context: RewardContext) -> None:
        """Pass everything to the trainer."""
        for column, values in self.extras.items():
            context.log_extra(column, values)
        for name, value in self.metrics:
            context.log_metric(name, value)

    def spread(self, indices: list[int], size: int) -> "Log":
        """Log of a batch of `size` samples, of which this log's have these indices; the others get None."""
        if len(indices) == size:
            return self
        extras: dict[str, list] = {}
        for column, values in self.extras.items():
            extras[column] = [None] * size
            for index, value in zip(indices, values, strict=True):
                extras[column][index] = value
        return Log(size, extras, self.metrics)

    @classmethod
    def joined(cls, logs: "list[Log]") -> "Log":
        """One log of several calls, with None for the samples of a call that did not log a column."""
        columns = dict.fromkeys(column for log in logs for column in log.extras)
        extras = {
            column: [value for log in logs for value in log.extras.get(column, [None] * log.size)] for column in columns
        }
        return cls(sum(log.size for log in logs), extras, [metric for log in logs for metric in log.metrics])
