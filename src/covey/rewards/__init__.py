"""Reward functions: calling them, and the built-in ones.

A reward function is called with keyword arguments and returns one number per completion, or rewards of its steps.
"""

# ruff: noqa: F401  (these are for users)
from covey.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from covey.rewards.contract import RewardError, RewardWarning, answers, per_completion
from covey.rewards.format import get_json_reward, get_regex_reward, json_reward, think_format_reward
from covey.rewards.functions import RewardContext
from covey.rewards.judge import LLMJudge
from covey.rewards.length import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
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

__all__ = sorted(name for name, value in globals().items() if callable(value) and not name.startswith("_"))
