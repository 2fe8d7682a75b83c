"""What goes wrong in a reward, and how it is shown.

`RewardError` stops the run: the function cannot score anything, or is none. `RewardWarning` tells, once per
function, about samples that could not be scored while the run goes on without them.
"""

from typing import Any

from covey.rewards.text import message_text, shorten


class RewardError(ValueError):
    """A reward function failed on everything or breaks its contract; the message names it and shows a sample."""


class MissingArgument(RewardError):
    """A reward function asks for what nobody has, whatever the batch: there is no use in trying again."""


class RewardWarning(UserWarning):
    """Some samples could not be scored; they count for nothing and are reported in the metrics."""


def describe_sample(prompt: Any, completion: Any) -> str:
    """Two indented lines that show a prompt and a completion, each shortened.

    Example:
        >>> print(describe_sample("2+2=", [{"role": "assistant", "content": "4"}]))
          prompt:     '2+2='
          completion: '4'
    """
    return f"  prompt:     {shorten(message_text(prompt))!r}\n  completion: {shorten(message_text(completion))!r}"
