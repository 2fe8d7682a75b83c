"""Format: rewards for reasoning tags, JSON and regular expressions, whatever the content."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from covey.rewards.text import completion_text

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```[A-Za-z]*\s*\n(.*)\n\s*```$", re.DOTALL)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where the completion starts with one closed `<think>...</think>` block, else 0.

    Example:
        >>> think_format_reward(["<think>2+2</think>4", "4", "<think>2+2"])
        [1.0, 0.0, 0.0]
    """
    return [1.0 if _THINK.match(completion_text(completion)) else 0.0 for completion in completions]


@dataclass(frozen=True)
class JsonReward:
    """See `get_json_reward`; a class so that it can be pickled."""

    required_keys: tuple[str, ...] = ()
    allow_fence: bool = True

    __name__ = "json_reward"

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(self.accepts(completion_text(completion))) for completion in completions]

    def accepts(self, text: str) -> bool:
        """True for a JSON object or array; with required keys, for an object that has all of them."""
        text = text.strip()
        fenced = _FENCED.match(text) if self.allow_fence else None
        try:
            value = json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        if self.required_keys:
            return isinstance(value, dict) and all(key in value for key in self.required_keys)
        return isinstance(value, dict | list)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where the completion is a JSON object or array, bare or in one fenced code block, else 0.

    Example:
        >>> json_reward(['{"answer": 4}', 'The answer is {"answer": 4}', "4"])
        [1.0, 0.0, 0.0]
    """
    return JsonReward()(completions)


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
    return JsonReward(tuple(required_keys), allow_fence)


@dataclass(frozen=True)
class RegexReward:
    """See `get_regex_reward`; a class so that it can be pickled."""

    pattern: re.Pattern[str]
    match: Literal["search", "fullmatch"]
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        matches = self.pattern.fullmatch if self.match == "fullmatch" else self.pattern.search
        return [1.0 if matches(completion_text(completion)) else 0.0 for completion in completions]


def get_regex_reward(
    pattern: str | re.Pattern[str],
    *,
    flags: int = 0,
    match: Literal["search", "fullmatch"] = "search",
    name: str = "regex_reward",
) -> Callable[..., list[float]]:
    """Make a reward that is 1 where `pattern` matches the completion, else 0.

    Args:
        pattern: a regular expression, as text or compiled.
        flags: `re` flags, if `pattern` is text.
        match: `"search"` finds it anywhere, `"fullmatch"` requires the whole completion to match.
        name: the reward's name in metrics.

    Raises:
        ValueError: `pattern` is no regular expression, or `match` is something else.

    Example:
        >>> get_regex_reward(r"#### -?\\d+$")(["2 + 2 is 4\\n#### 4", "4"])
        [1.0, 0.0]
    """
    if match not in ("search", "fullmatch"):
        raise ValueError(f"match={match!r}; choose 'search' or 'fullmatch'.")
    try:
        return RegexReward(re.compile(pattern, flags), match, name)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}.") from error
