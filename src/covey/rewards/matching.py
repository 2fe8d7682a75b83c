"""Exact and numeric comparison with a column `answer` or `solution`; for algebra, units and sets see `accuracy`."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from covey.rewards.contract import answers, with_settings
from covey.rewards.text import after_thinking, completion_text


def _match(
    extract: Callable[[Any], Any],
    tolerance: float,
    completions: list[Any],
    answer: list[Any] | None = None,
    solution: list[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Compare what is in each completion with what is in the column `answer`, else `solution`."""
    expected = answer if answer is not None else solution
    if expected is None:
        raise ValueError("this reward needs a dataset column 'answer' or 'solution', and there is neither.")
    pairs = zip(completions, expected, strict=True)
    return [None if one is None else _rate(extract(given), extract(str(one)), tolerance) for given, one in pairs]


def _rate(value: Any, target: Any, tolerance: float) -> float | None:
    """1 where they are equal, up to a share of the target; None without a target."""
    if value is None or target is None:
        return None if target is None else 0.0
    return float(value == target or (tolerance > 0 and abs(value - target) <= Fraction(tolerance) * abs(target)))


def _normalised(ignore_case: bool, ignore_whitespace: bool, completion: Any) -> str:
    text = after_thinking(completion_text(completion))
    if ignore_whitespace:
        text = " ".join(text.split())
    return text.casefold() if ignore_case else text


_without_whitespace = partial(_normalised, False, True)


@answers(_without_whitespace)
def exact_match_reward(
    completions: list[Any], answer: list[Any] | None = None, solution: list[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 where the completion is the `answer` (or `solution`), whitespace and thinking aside, else 0; None for None.

    Example:
        >>> exact_match_reward([" Paris\\n", "paris", "It is Paris"], answer=["Paris"] * 3)
        [1.0, 0.0, 0.0]
    """
    return _match(_without_whitespace, 0.0, completions, answer, solution)


def get_exact_match_reward(
    ignore_case: bool = False, ignore_whitespace: bool = True
) -> Callable[..., list[float | None]]:
    """Make an `exact_match_reward` with other rules of equality.

    Args:
        ignore_case: compare case-folded texts.
        ignore_whitespace: strip both ends and replace each run of whitespace by one space.

    Example:
        >>> get_exact_match_reward(ignore_case=True)(["paris", "Rome"], answer=["Paris", "Paris"])
        [1.0, 0.0]
    """
    extract = partial(_normalised, ignore_case, ignore_whitespace)
    return answers(extract)(with_settings(_match, "exact_match_reward", extract, 0.0))


_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
_NUMBER = re.compile(
    # A sign counts unless it follows a digit, a letter or a closing bracket: then it is a subtraction or a hyphen.
    rf"(?:(?<![A-Za-z0-9_)\]}}.])(?P<sign>[-+\u2212])\s?)?"
    r"(?:\\[dt]?frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}"
    rf"|(?<![A-Za-z0-9_.])(?P<numerator>{_UNSIGNED})(?:\s?/\s?(?P<denominator>{_UNSIGNED}))?)"
)
_MAX_DIGITS = 1000  # longer runs of digits are noise, and slow to convert


def last_number(text: str) -> Fraction | None:
    """Exact value of the last number in `text`, or None; currency signs are skipped."""
    found = None
    for found in _NUMBER.finditer(text.replace("{,}", ",").replace("\\$", "").replace("$", "")):  # noqa: B007
        pass
    if found is None:
        return None
    top, bottom = found["top"] or found["numerator"], found["bottom"] or found["denominator"] or "1"
    if len(top) + len(bottom) > _MAX_DIGITS:
        return None
    numerator, denominator = (Fraction(part.replace(",", "")) for part in (top, bottom))
    if denominator == 0:
        return None
    return (-1 if found["sign"] in ("-", "\u2212") else 1) * numerator / denominator


def _number(completion: Any) -> Fraction | None:
    return last_number(completion_text(completion))


@answers(_number)
def numeric_match_reward(
    completions: list[Any], answer: list[Any] | None = None, solution: list[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the `answer` (or `solution`), else 0.

    Numbers are compared exactly (1/2 = 0.5, 1,000 = 1000). None where the column holds no number.

    Example:
        >>> numeric_match_reward(["That makes 1,234.", "It is 0.5", "no idea"], answer=["#### 1234", "1/2", 3])
        [1.0, 1.0, 0.0]
    """
    return _match(_number, 0.0, completions, answer, solution)


def get_numeric_match_reward(relative_tolerance: float = 0.0) -> Callable[..., list[float | None]]:
    """Make a `numeric_match_reward` with a tolerance.

    Args:
        relative_tolerance: largest accepted error as a share of the expected number's size.

    Raises:
        ValueError: the tolerance is negative or not finite.

    Example:
        >>> get_numeric_match_reward(relative_tolerance=0.01)(["about 0.333"], answer=["1/3"])
        [1.0]
    """
    if not 0 <= relative_tolerance < float("inf"):
        raise ValueError(f"relative_tolerance={relative_tolerance} must be a finite number, at least 0.")
    return answers(_number)(with_settings(_match, "numeric_match_reward", _number, relative_tolerance))
