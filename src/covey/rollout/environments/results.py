"""What environments return, looked at before it is used: openings, observations, steps and rewards.

Everything here is pure. What cannot be used raises `EnvironmentFailed`, which costs that rollout.
"""

import copy
import math
import numbers
import sys
from dataclasses import dataclass
from typing import Any

from covey.core.rollout import Message
from covey.rollout.environments.calls import EnvironmentFailed
from covey.rollout.images import as_parts
from covey.rollout.prompts import is_conversational
from covey.rollout.tools.result_text import parts_of
from covey.runtime.user_code import format_value

Observation = str | list[Message] | list[dict[str, Any]]
"""What the policy is told: text, messages, or parts of one, such as `{"type": "image", "image": ...}`."""

Reward = float | list[tuple[Any, float | None]] | None
"""Of a rollout: a number, `(end, reward)` of its steps, or an abstention."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a text environment answered to a turn.

    Attributes:
        observation: for the policy, or None.
        reward: of the turn, or None.
        done: the episode is over.
        cut: it is over because it lasted too long, not because of what happened in it.
    """

    observation: Observation | None
    reward: float | None
    done: bool
    cut: bool = False


def checked_observation(value: Any, where: str) -> Observation | None:
    """Text, messages, or None; a PIL image, or a list with images and other things, becomes parts. All is copied.

    Raises:
        EnvironmentFailed: anything else.
    """
    if value is None or isinstance(value, str):
        return value
    if is_conversational(value) and all(isinstance(one, dict) and "role" in one for one in value):
        return copy.deepcopy(value)
    parts = parts_of(value, sys.maxsize)
    if parts is not None:
        return copy.deepcopy(parts)  # an environment may draw its next picture over this one
    raise EnvironmentFailed(
        f"{where} returned {format_value(value)}; it must return text, an image, a list of text and images, a list of"
        " messages with 'role' and 'content', or None"
    )


def checked_step(value: Any, where: str) -> Step:
    """`(observation, reward, done, info)`, or gymnasium's `(observation, reward, terminated, truncated, info)`.

    Raises:
        EnvironmentFailed: anything else.
    """
    if not isinstance(value, tuple) or len(value) not in (4, 5):
        raise EnvironmentFailed(
            f"{where} returned {format_value(value)}; it must return (observation, reward, done, info) or"
            " (observation, reward, terminated, truncated, info)"
        )
    done, cut = value[2], value[3] if len(value) == 5 else False
    for flag in (done, cut):
        if not isinstance(flag, bool) and type(flag).__name__ not in ("bool", "bool_"):  # numpy's has another name
            raise EnvironmentFailed(f"{where} returned {format_value(flag)} where it says whether the episode is over")
    observation = checked_observation(value[0], where)
    reward = checked_number(value[1], where)
    if observation is None and not (done or cut):
        raise EnvironmentFailed(f"{where} returned no observation, although the episode goes on")
    return Step(observation, reward, bool(done or cut), bool(cut and not done))


def checked_reward(value: Any, where: str) -> Reward:
    """A number, None, or a list of `(end, reward)` for the steps of the completion.

    Raises:
        EnvironmentFailed: anything else, NaN and infinities included.
    """
    if isinstance(value, list):
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            raise EnvironmentFailed(f"{where} returned {format_value(value)}; steps are a list of (end, reward)")
        return [(end, checked_number(reward, where)) for end, reward in value]
    return checked_number(value, where)


def checked_number(value: Any, where: str) -> float | None:
    """A finite number, of Python, numpy or torch, or None.

    Raises:
        EnvironmentFailed: anything else.
    """
    if value is None:
        return None
    number = value
    if not isinstance(number, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise EnvironmentFailed(
            f"{where} returned the reward {format_value(value)}; it must be a finite number or None"
        )
    return float(number)


def opened_with(prompt: Any, opening: Observation | None, where: str) -> list[Message]:
    """The prompt that an episode begins with.

    Text and images of the environment are added to the last message of the user, messages follow those of the row.
    Where the row has no prompt, they are all there is.

    Args:
        prompt: of the row, or None.
        opening: what `reset` returned.
        where: names the method.

    Raises:
        EnvironmentFailed: there is nothing to begin with, or the prompt is a string.
    """
    if prompt is None or prompt == []:
        if not opening:
            raise EnvironmentFailed(f"the row has no prompt, and {where} returned none")
        return as_messages(opening)
    if not is_conversational(prompt):
        raise EnvironmentFailed(f"an environment needs a prompt of messages, and the row's is {format_value(prompt)}")
    messages: list[Message] = copy.deepcopy(prompt)
    if opening is None or opening == "":
        return messages
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None or _are_messages(opening):
        return messages + as_messages(opening)
    content = last.get("content")
    if isinstance(content, list) or not isinstance(opening, str):
        last["content"] = [*as_parts(content), *as_parts(opening)]
    else:
        last["content"] = (content or "") + opening
    return messages


def as_messages(observation: Observation) -> list[Message]:
    """An observation as what is said to the policy."""
    if not isinstance(observation, str) and _are_messages(observation):
        return list(observation)
    return [{"role": "user", "content": observation}]


def _are_messages(observation: Observation) -> bool:
    return not isinstance(observation, str) and all("role" in one for one in observation)
