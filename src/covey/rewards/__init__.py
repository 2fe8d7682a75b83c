"""Reward functions: calling them, and the built-in ones, imported on first use.

A reward function is called with keyword arguments and returns one number per completion, or rewards of its steps. A
`..._reward` or `get_...` that is listed here also has its name on the command line.
"""

# ruff: noqa: F401  (imports for type checkers; `__getattr__` gives the objects)
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
    from covey.rewards.contract import RewardError, RewardWarning, answers, per_completion
    from covey.rewards.format import get_json_reward, get_regex_reward, json_reward, think_format_reward
    from covey.rewards.functions import RewardContext
    from covey.rewards.length import (
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
    )
    from covey.rewards.matching import (
        exact_match_reward,
        get_exact_match_reward,
        get_numeric_match_reward,
        numeric_match_reward,
    )
    from covey.rewards.resolve import resolve_reward
    from covey.rewards.steps import CharEnd, TurnEnd
    from covey.rewards.suite import RewardResult, RewardSuite
    from covey.rewards.text import completion_text

_MODULES = {
    "accuracy": ["accuracy_reward", "reasoning_accuracy_reward"],
    "contract": ["RewardError", "RewardWarning", "answers", "per_completion"],
    "format": ["get_json_reward", "get_regex_reward", "json_reward", "think_format_reward"],
    "functions": ["RewardContext"],
    "length": ["get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"],
    "matching": ["exact_match_reward", "get_exact_match_reward", "get_numeric_match_reward", "numeric_match_reward"],
    "resolve": ["resolve_reward"],
    "steps": ["CharEnd", "TurnEnd"],
    "suite": ["RewardResult", "RewardSuite"],
    "text": ["completion_text"],
}

__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
