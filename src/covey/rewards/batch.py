"""What reward functions are given: samples as keyword arguments, and two functions to log with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from covey.core.rollout import FinishReason, Rollout
from covey.rewards.errors import RewardError, describe_sample
from covey.runtime.user_code import ATOMS

RESERVED = frozenset({"prompts", "completions", "completions_ids", "trainer_state", "log_extra", "log_metric"})
"""Arguments that are always given; a dataset column of that name could not be."""

NOT_FORWARDED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that the arguments above replace."""


@dataclass(frozen=True)
class RewardContext:
    """What reward functions are told beside the samples.

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

    def scorable(self) -> "RewardBatch":
        """Those whose rollout did not fail: one that failed says nothing about the policy, and may lack anything."""
        kept = [index for index, rollout in enumerate(self.rollouts) if rollout.finish is not FinishReason.ERROR]
        if len(kept) == len(self):
            return self
        return RewardBatch([self.rows[index] for index in kept], [self.rollouts[index] for index in kept])

    def sample(self, index: int) -> "RewardBatch":
        """The batch of one sample."""
        return RewardBatch([self.rows[index]], [self.rollouts[index]])

    def describe(self, index: int) -> str:
        """Prompt and completion of a sample, shortened, for messages."""
        return describe_sample(self.rollouts[index].asked(self.rows[index]), self.rollouts[index].completion)

    @cached_property
    def arguments(self) -> dict[str, list]:
        """Keyword arguments: samples, dataset columns and rollout extras, each a list with one element per sample.

        Where an extra has the name of a dataset column, the extra is given: it is what happened in this episode. A
        value that a row or a rollout lacks is None.

        Raises:
            RewardError: a column or an extra has a reserved name.
        """
        columns = {**_columns(self.rows), **_columns([rollout.extras for rollout in self.rollouts])}
        refuse_reserved(columns)
        completion_ids = [rollout.completion_ids for rollout in self.rollouts]
        return {
            **columns,
            "prompts": [rollout.asked(row) for row, rollout in zip(self.rows, self.rollouts, strict=True)],
            "completions": [rollout.completion for rollout in self.rollouts],
            "completion_ids": completion_ids,
            "completions_ids": completion_ids,
        }


def refuse_reserved(columns: Iterable[str]) -> None:
    """Make sure that no column hides an argument.

    Raises:
        RewardError: one has a reserved name.
    """
    taken = sorted(RESERVED.intersection(columns))
    if taken:
        raise RewardError(
            f"column {taken[0]!r} has the name of an argument that every reward function receives "
            f"({', '.join(sorted(RESERVED))}); rename it, with `dataset.rename_column` for instance."
        )


def _columns(records: list[dict[str, Any]]) -> dict[str, list]:
    names = dict.fromkeys(name for record in records for name in record if name not in NOT_FORWARDED)
    return {name: [record.get(name) for record in records] for name in names}


def _loggable(value: Any) -> Any:
    """A value of a logged column: plain data copied, numbers of numpy and torch as numbers, the rest as text.

    Here, under the deadline of the function that logs, not where tables are written: it may be slow, or broken.
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
    """What one call of a reward function logged; kept back until the call has succeeded.

    Attributes:
        size: samples of the call, the length that logged columns must have.
    """

    size: int
    extras: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: list) -> None:
        """What reward functions receive as `log_extra`.

        Raises:
            RewardError: not one value per sample.
        """
        values = list(values)
        if len(values) != self.size:
            raise RewardError(f"log_extra({column!r}, ...) was given {len(values)} values for {self.size} samples.")
        self.extras[str(column)] = [_loggable(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """What reward functions receive as `log_metric`."""
        self.metrics.append((str(name), float(value)))

    def replay(self, context: RewardContext) -> None:
        """Hand everything on to the trainer."""
        for column, values in self.extras.items():
            context.log_extra(column, values)
        for name, value in self.metrics:
            context.log_metric(name, value)

    def spread(self, places: list[int], size: int) -> "Log":
        """The same for a batch of `size` samples, of which this log's are those at `places`; None elsewhere."""
        if len(places) == size:
            return self
        extras: dict[str, list] = {}
        for column, values in self.extras.items():
            extras[column] = [None] * size
            for place, value in zip(places, values, strict=True):
                extras[column][place] = value
        return Log(size, extras, self.metrics)

    @classmethod
    def joined(cls, logs: "list[Log | None]") -> "Log":
        """One log of several calls; None stands for a failed call of one sample. A column has None where it lacks."""
        whole = [Log(1) if log is None else log for log in logs]
        columns = dict.fromkeys(column for log in whole for column in log.extras)
        extras = {
            column: [value for log in whole for value in log.extras.get(column, [None] * log.size)]
            for column in columns
        }
        return cls(sum(log.size for log in whole), extras, [metric for log in whole for metric in log.metrics])
