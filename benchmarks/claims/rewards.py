"""Rewards of claims; those that an arm alone has are named `benchmarks/claims/rewards.py:name` in its settings."""

from typing import Any

from benchmarks.halving import right_number
from covey.rewards import get_soft_overlong_punishment

LIMIT, CACHE = 24, 8
"""Tokens of a completion in claim 20, and how many before the limit are punished."""


def all_or_nothing(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 if the completion begins with the right number, else 0."""
    return [float(reward == 1.0) for reward in right_number(completions, answer)]


def any_number(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 if the completion begins with a number, else 0."""
    return [float(reward > 0) for reward in right_number(completions, answer)]


def short_enough(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """0 up to `LIMIT - CACHE` tokens, then less and less, to -1 (DAPO, 2503.14476, eq. 13)."""
    return get_soft_overlong_punishment(LIMIT, CACHE)(completion_ids=completion_ids)


REWARDS: dict[str, list[Any]] = {
    "graded": [right_number],
    "binary": [all_or_nothing],
    "two": [all_or_nothing, any_number],
}
"""Rewards of a study by name. Graded: .2 for a wrong number."""
