"""Rewards for the format of completions: reasoning tags, JSON and regular expressions."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from covey.rewards.contract import with_settings
from covey.rewards.text import after_thinking, completion_text

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```[A-Za-z]*\s*\n(.*)\n\s*```$", re.DOTALL)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 if the completion starts with one closed `<think>...</think>` block, else 0.

    A block that the prompt opens (the argument `thinking_openings` from the trainer) counts as the completion's.

    Example:
        >>> think_format_reward(["<think>2+2</think>4", "4", "<think>2+2"])
        [1.0, 0.0, 0.0]
        >>> think_format_reward(["2+2</think>4", "4"], thinking_openings=["<think>\\n", "<think>\\n"])
        [1.0, 0.0]
    """
    pairs = zip(_openings(completions, kwargs), completions, strict=True)
    return [1.0 if _THINK.match(opening + completion_text(completion)) else 0.0 for opening, completion in pairs]


def _openings(completions: list[Any], columns: dict[str, Any]) -> Sequence[str]:
    """For each completion, the text at the prompt's end that opens thinking; empty texts if not given."""
    return columns.get("thinking_openings") or [""] * len(completions)


def _json(required_keys: Sequence[str], allow_fence: bool, completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(_is_json(after_thinking(completion_text(one)), required_keys, allow_fence)) for one in completions]


def _is_json(text: str, required_keys: Sequence[str], allow_fence: bool) -> bool:
    """True for text that is a JSON object or array or, with required keys, an object that has all of them."""
    text = text.strip()
    fenced = _FENCED.match(text) if allow_fence else None
    try:
        value = json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    if required_keys:
        return isinstance(value, dict) and all(key in value for key in required_keys)
    return isinstance(value, dict | list)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 if the completion after its thinking is a JSON object or array, bare or in one fenced code block, else 0.

    Example:
        >>> json_reward(['{"answer": 4}', 'The answer is {"answer": 4}', "4"])
        [1.0, 0.0, 0.0]
    """
    return _json((), True, completions)


def get_json_reward(required_keys: Sequence[str] = (), allow_fence: bool = True) -> Callable[..., list[float]]:
    """Make a `json_reward` with conditions.

    Args:
        required_keys: keys that the top-level object must have.
        allow_fence: accept one fenced code block around the JSON.

    Raises:
        ValueError: `required_keys` is a single string.

    Example:
        >>> get_json_reward(["name", "age"])(['{"name": "Ann", "age": 7}', '{"name": "Ann"}'])
        [1.0, 0.0]
    """
    if isinstance(required_keys, str):
        raise ValueError(f"required_keys must be a list of keys; for one key pass [{required_keys!r}].")
    return with_settings(_json, "json_reward", tuple(required_keys), allow_fence)


def _regex(
    pattern: re.Pattern[str],
    match: str,
    completions: list[Any],
    **kwargs: Any,
) -> list[float]:
    matches = pattern.fullmatch if match == "fullmatch" else pattern.search
    rewards = []
    for opening, completion in zip(_openings(completions, kwargs), completions, strict=True):
        text = completion_text(completion)
        rewards.append(1.0 if matches(text) or (opening and matches(opening + text)) else 0.0)
    return rewards


def get_regex_reward(
    pattern: str | re.Pattern[str],
    *,
    flags: int = 0,
    match: Literal["search", "fullmatch"] = "search",
    name: str = "regex_reward",
) -> Callable[..., list[float]]:
    """Make a reward that is 1 if `pattern` matches the completion, else 0.

    If the prompt opens a block of thinking, the pattern may instead match this opening and the completion together.

    Args:
        pattern: a regular expression, as text or compiled.
        flags: `re` flags, if `pattern` is text.
        match: `"search"` finds it anywhere, `"fullmatch"` requires the whole completion to match.
        name: the reward's name in metrics.

    Raises:
        ValueError: `pattern` is not a regular expression, or `match` is another value.

    Example:
        >>> get_regex_reward(r"#### -?\\d+$")(["2 + 2 is 4\\n#### 4", "4"])
        [1.0, 0.0]
    """
    if match not in ("search", "fullmatch"):
        raise ValueError(f"match={match!r}; choose 'search' or 'fullmatch'.")
    try:
        return with_settings(_regex, name, re.compile(pattern, flags), match)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}.") from error
