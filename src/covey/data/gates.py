"""Gates: functions that decide if a finished group is trained on; a rejected group is replaced by one of its source.

To add a gate, write a function of `GroupFacts` and a case in `gates_of`; settings are checked in
`covey.config.choosing`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from covey.algorithms.credit import Credit
from covey.core.records import Scores
from covey.runtime.import_path import resolve
from covey.runtime.user_code import format_error, place_of


@dataclass(frozen=True)
class GroupFacts:
    """A finished group as every process knows it: G completions of one prompt, F reward functions."""

    row: dict[str, Any]  # the dataset row
    rewards: list[list[float]]  # [G, F], NaN where a function gave none
    totals: list[float]  # [G] weighted, NaN without a reward
    advantages: list[list[float]]  # [G] distinct advantages of each completion's tokens; an empty list without tokens
    lengths: list[int]  # [G] sampled tokens
    truncated: list[bool]  # [G]
    learned: list[bool]  # [G] False for completions that are not trained on, such as masked ones

    @property
    def mean(self) -> float | None:
        """Mean total reward; None if no completion has one."""
        known = [total for total in self.totals if total == total]
        return fmean(known) if known else None


Gate = Callable[[GroupFacts], bool]


def signal(group: GroupFacts) -> bool:
    """True if a trained completion has an advantage other than 0, apart from a KL penalty (DAPO's criterion)."""
    return advantage_range(group, 0.0, 0.0)


def advantage_range(group: GroupFacts, low: float, high: float) -> bool:
    """True if a trained completion has an advantage outside of [low, high]."""
    learned = (values for values, is_learned in zip(group.advantages, group.learned, strict=True) if is_learned)
    return any(not low <= value <= high for values in learned for value in values)


def reward_range(group: GroupFacts, bounds: Mapping[str, float]) -> bool:
    """True if the mean total reward lies within the bounds; `from` and `to` include their bound.

    A group without any reward is rejected.
    """
    mean, inside = (
        group.mean,
        {
            "above": lambda mean, bound: mean > bound,
            "from": lambda mean, bound: mean >= bound,
            "below": lambda mean, bound: mean < bound,
            "to": lambda mean, bound: mean <= bound,
        },
    )
    return mean is not None and all(inside[name](mean, bound) for name, bound in bounds.items())


def max_truncated(group: GroupFacts, share: float) -> bool:
    """True if at most this share of the completions was truncated."""
    return sum(group.truncated) <= share * len(group.truncated)


def by_function(group: GroupFacts, function: Callable[[GroupFacts], Any], name: str) -> bool:
    try:
        return bool(function(group))
    except Exception as error:
        raise ValueError(f"the gate {name!r} failed: {format_error(error)}{place_of(error)}.") from error


def gates_of(given: Mapping[str, Any] | None, dynamic_sample: bool = False) -> dict[str, Gate]:
    """Gates by name; `dynamic_sample` adds `signal`, unless the setting has it as False."""
    found: dict[str, Gate] = {"signal": signal} if dynamic_sample else {}
    for name, setting in (given or {}).items():
        if name == "signal" and not setting:
            found.pop(name, None)
        elif name == "signal":
            found[name] = signal
        elif name == "reward_range":
            found[name] = partial(reward_range, bounds=dict(setting))
        elif name == "advantage_range":
            found[name] = partial(advantage_range, low=setting[0], high=setting[1])
        elif name == "max_truncated":
            found[name] = partial(max_truncated, share=setting)
        else:
            function = setting if callable(setting) else resolve(setting, f"gate {name!r}")
            found[name] = partial(by_function, function=function, name=name)
    return found


def facts_of_groups(
    scores: Scores,
    credit: Credit,
    totals: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
    learned: Sequence[bool],
    rows: Sequence[dict[str, Any]],
) -> list[GroupFacts]:
    """[P] facts of groups, from completions [N] of which those of a group are consecutive; `rows` are [P].

    Placeholders (absent rollouts) are no completions of a group.
    """
    size, rewards = len(lengths) // max(len(rows), 1), scores.rewards.tolist()
    distinct: list[dict[float, None]] = [{} for _ in lengths]
    for completion, value in zip(credit.ends.rows.tolist(), credit.ends.to_go.float().tolist(), strict=True):
        distinct[completion][value] = None
    columns: tuple[Sequence[Any], ...] = (rewards, totals, [*map(list, distinct)], lengths, truncated, learned)
    present = scores.present
    groups = [
        [number for number in range(size * place, size * place + size) if present[number]] for place in range(len(rows))
    ]
    return [
        GroupFacts(row, *([column[number] for number in own] for column in columns))
        for row, own in zip(rows, groups, strict=True)
    ]
