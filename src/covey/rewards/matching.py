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
    """Compare a value read from each completion with one read from the column `answer`, or else `solution`."""
    expected = answer if answer is not None else solution
    if expected is None:
        raise ValueError("this reward needs a dataset column 'answer' or 'solution', and there is neither.")
    pairs = zip(completions, expected, strict=True)
    return [None if one is None else _rate(extract(given), extract(str(one)), tolerance) for given, one in pairs]


def _rate(value: Any, target: Any, tolerance: float) -> float | None:
    """1 if the value equals the target up to a share of the target's size, else 0; None without a target."""
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
    """1 if the completion equals the `answer` (or `solution`), ignoring thinking and outer whitespace, else 0.

    None where the column holds None.

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


_MINUS = "-\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"  # hyphens, dashes and minus signs
_SPACES = " \u00a0\u2009\u202f"  # between thousands
_DECIMAL = (
    rf"(?:[1-9]\d{{0,2}}(?:[{_SPACES}]\d{{3}})+(?![{_SPACES}]?\d)(?:\.\d+)?"  # 1 234.5
    r"|[1-9]\d{0,2}(?:['\u2019_]\d{3})+(?!\d)(?:\.\d+)?"  # 1'234 and 1_234
    r"|\d{1,3}(?:\.\d{3})+,\d+(?![,.]?\d)"  # 1.234,5
    r"|\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?"  # 1,234.5
    r"|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)(?:\.\d+)?"  # 12,34,567.5
    r"|\d+(?:\.\d+)?|\.\d+)"
)
_TIMES = rf"\s?(?:[x*×·⋅]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?[{{(]?(?P<power>[{_MINUS}+]?\d{{1,3}})(?!\d)[}})]?"
_FRACTION = (
    rf"\\[dt]?frac\s?(?:\{{\s?(?P<top>[{_MINUS}]?\d+(?:\.\d+)?)\s?\}}\{{\s?(?P<bottom>[{_MINUS}]?\d+(?:\.\d+)?)\s?\}}"
    r"|(?P<top_digit>\d)(?P<bottom_digit>\d))"
)
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
           "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}  # fmt: skip
_NUMBER = re.compile(
    # A sign next to its number counts unless it follows a digit, a letter or a closing bracket, as in a subtraction, a
    # range or a hyphenated word. Before a space it counts after an operator or an opening bracket on its line; at the
    # beginning of a line it is a bullet, and after a word a dash.
    rf"(?:(?<![A-Za-z0-9_)\]}}.])(?P<sign>[{_MINUS}+])(?=[^\s])"
    rf"|(?<=[=<>≤≥≈≠(\[{{,:;+/×·^])[ \t]*(?P<spaced>[{_MINUS}+])[ \t]+)?"
    rf"(?:(?:(?<![A-Za-z0-9_.])(?P<whole>\d{{1,9}})[ \t]?)?{_FRACTION}"
    rf"|(?<![A-Za-z0-9_.])(?P<mixed>\d{{1,9}})[ \t]+(?P<part>\d{{1,9}})\s?/\s?(?P<of>\d{{1,9}})(?![\d/.])"
    rf"|(?<![A-Za-z0-9_.])(?P<numerator>{_DECIMAL})"
    rf"(?:[eE](?P<exponent>[{_MINUS}+]?\d{{1,3}})(?!\d)|{_TIMES})?(?:\s?/\s?(?P<denominator>{_DECIMAL}))?)"
)
_MAX_DIGITS = 1000  # longer runs of digits are noise, and slow to convert
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_POWER_OF_TEN = re.compile(r"(?<=10)[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_THIN_SPACES = re.compile(r"(?<=\d)(?:\\[,;:!]|\{,\}|\\ |~)(?=\d{3}(?!\d))")
_AFTER_SIGN = re.compile(rf"(?<=[{_MINUS}+])\\?[$€£¥₹]")
_QUOTE = re.compile(r"^(?:[ \t]*>)+", re.MULTILINE)  # Markdown's, no operator
_CURRENCY = re.compile(r"\\?[$€£¥₹]")


def last_number(text: str) -> Fraction | None:
    """Exact value of the last number in `text`, or None.

    The number may have a sign, thousands separated by commas, spaces, apostrophes or underscores, or an exponent
    (`1.5e3`, `1.5 × 10^3`), and may be a fraction (`1/2`, `\\frac{1}{2}`, `½`) or a mixed number (`1 1/2`). Currencies,
    percent signs and units are ignored. A single separator is read as in English: `1.000` is one, `1,000` a thousand. A
    number in parentheses is not negative; of a range, a date or a time the last number counts.

    Example:
        >>> texts = ["The answer is:\\n- 42", "x = - 42", "between 3 - 5", "1 000", "1 1/2", "-$1,200.50"]
        >>> [float(last_number(text)) for text in texts]
        [42.0, -42.0, 5.0, 1000.0, 1.5, -1200.5]
    """
    found = None
    for found in _NUMBER.finditer(_plain(text)):  # noqa: B007
        pass
    return None if found is None or len(found[0]) > _MAX_DIGITS else _value(found)


def _plain(text: str) -> str:
    """Text without currencies, Markdown's quotes and LaTeX's spaces, with plain powers of ten and fractions."""
    text = _CURRENCY.sub(" ", _AFTER_SIGN.sub("", _THIN_SPACES.sub(",", _QUOTE.sub("", text))))
    text = _POWER_OF_TEN.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text)
    for sign, fraction in _VULGAR.items():
        if sign in text:
            text = re.sub(rf"(?<![{_MINUS}+]){sign}", f" {fraction}", text).replace(sign, fraction)
    return text


def _value(found: re.Match[str]) -> Fraction | None:
    negative = (found["sign"] or found["spaced"] or "+") != "+"
    whole = Fraction(found["whole"] or found["mixed"] or 0)
    if found["numerator"] is not None:
        top, bottom = _decimal(found["numerator"]), _decimal(found["denominator"] or "1")
        top *= Fraction(10) ** int(_signed(found["exponent"] or found["power"] or "0"))
    else:
        top = _decimal(found["top"] or found["top_digit"] or found["part"])
        bottom = _decimal(found["bottom"] or found["bottom_digit"] or found["of"])
    if bottom == 0:
        return None
    value = whole + top / bottom
    return -value if negative else value


def _decimal(text: str) -> Fraction:
    text = _signed(text)
    if "." in text and "," in text and text.rindex(",") > text.rindex("."):  # 1.234,5
        text = text.replace(".", "").replace(",", ".")
    return Fraction(re.sub(rf"[,'\u2019_{_SPACES}]", "", text))


def _signed(text: str) -> str:
    return re.sub(f"^[{_MINUS}]", "-", text)


def _number(completion: Any) -> Fraction | None:
    return last_number(completion_text(completion))


@answers(_number)
def numeric_match_reward(
    completions: list[Any], answer: list[Any] | None = None, solution: list[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 if the last number of the completion equals the last number of the `answer` (or `solution`), else 0.

    Numbers are compared exactly (1/2 = 0.5, 1,000 = 1000) and without units: 50% is 50. None where the column has no
    number.

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
