"""Reward functions: calling them, and the built-in ones.

`RewardSuite` runs the reward functions of a training run; `resolve_reward` finds one by name. The built-in rewards
live in modules by theme (`accuracy`, `format`, `length`, `matching`, `repetition`) and are ordinary reward functions:
anything that is called with keyword arguments and returns one number per completion (or rewards of its steps, whose
ends `CharEnd` and `TurnEnd` name) is one, so adding another means writing it and, to give it a name on the command
line, listing it in `resolve.BUILT_IN`. Everything is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
    from covey.rewards.batch import RewardContext
    from covey.rewards.decorators import answers, per_completion
    from covey.rewards.errors import RewardError, RewardWarning
    from covey.rewards.format import get_json_reward, get_regex_reward, json_reward, think_format_reward
    from covey.rewards.length import get_cosine_scaled_reward, get_soft_overlong_punishment
    from covey.rewards.matching import (
        exact_match_reward,
        get_exact_match_reward,
        get_numeric_match_reward,
        numeric_match_reward,
    )
    from covey.rewards.repetition import get_repetition_penalty_reward
    from covey.rewards.resolve import resolve_reward
    from covey.rewards.steps import CharEnd, TurnEnd
    from covey.rewards.suite import RewardResult, RewardSuite
    from covey.rewards.text import completion_text

_MODULES = {
    "CharEnd": "steps",
    "RewardContext": "batch",
    "RewardError": "errors",
    "RewardResult": "suite",
    "RewardSuite": "suite",
    "RewardWarning": "errors",
    "TurnEnd": "steps",
    "accuracy_reward": "accuracy",
    "answers": "decorators",
    "completion_text": "text",
    "exact_match_reward": "matching",
    "get_cosine_scaled_reward": "length",
    "get_exact_match_reward": "matching",
    "get_json_reward": "format",
    "get_numeric_match_reward": "matching",
    "get_regex_reward": "format",
    "get_repetition_penalty_reward": "repetition",
    "get_soft_overlong_punishment": "length",
    "json_reward": "format",
    "numeric_match_reward": "matching",
    "per_completion": "decorators",
    "reasoning_accuracy_reward": "accuracy",
    "resolve_reward": "resolve",
    "think_format_reward": "format",
}

__all__ = [
    "CharEnd",
    "RewardContext",
    "RewardError",
    "RewardResult",
    "RewardSuite",
    "RewardWarning",
    "TurnEnd",
    "accuracy_reward",
    "answers",
    "completion_text",
    "exact_match_reward",
    "get_cosine_scaled_reward",
    "get_exact_match_reward",
    "get_json_reward",
    "get_numeric_match_reward",
    "get_regex_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "json_reward",
    "numeric_match_reward",
    "per_completion",
    "reasoning_accuracy_reward",
    "resolve_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
