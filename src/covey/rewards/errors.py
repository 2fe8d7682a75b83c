"""Errors and warnings of reward functions."""

from typing import Any

from covey.rewards.text import message_text, shorten


class RewardError(ValueError):
    """A reward function failed on all samples or breaks its contract; stops the run."""


class MissingArgument(RewardError):
    """A reward function asks for an argument that no batch has."""


class RewardWarning(UserWarning):
    """Some samples could not be scored; they get no reward and are counted in the metrics."""


def describe_sample(prompt: Any, completion: Any) -> str:
    """Prompt and completion on two indented lines, shortened.

    Example:
        >>> print(describe_sample("2+2=", [{"role": "assistant", "content": "4"}]))
          prompt:     '2+2='
          completion: '4'
    """
    return f"  prompt:     {shorten(message_text(prompt))!r}\n  completion: {shorten(message_text(completion))!r}"
