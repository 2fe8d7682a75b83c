"""Interface of environments: methods that are tools, columns that `reset` gets, and checks of return values."""

import copy
import inspect
import math
import numbers
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from covey.core.records import Message
from covey.rollout.images import as_parts
from covey.rollout.prompts import is_conversational
from covey.rollout.tools.toolbox import parts_of
from covey.runtime.user_code import format_value, parameters_of

NOT_TOOLS = frozenset({"reset", "step", "close", "get_reward"})  # public methods that the library calls itself
Observation = str | list[Message] | list[dict[str, Any]]  # text, messages, or parts: {"type": "image", "image": ...}
Reward = float | list[tuple[Any, float | None]] | None  # a number, (end, reward) of steps, or an abstention


class EnvironmentFailed(Exception):
    """An environment raised, hung, or returned a value that cannot be used; the message names the method."""


def instructed(adapter: Any) -> list[Message]:
    system = [] if adapter.system is None else [{"role": "system", "content": adapter.system}]
    return [*system, {"role": "user", "content": adapter.instructions}]


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """Public methods of an object, without `NOT_TOOLS`, in the order in which its class and its bases define them."""
    names = {
        name: None
        for base in type(environment).__mro__
        if base is not object
        for name, value in vars(base).items()
        if not name.startswith("_")
        and name not in NOT_TOOLS
        and isinstance(value, staticmethod | classmethod | type(tool_methods))
    }
    return [getattr(environment, name) for name in names]


class Given(dict):
    """A row's dictionary without keys whose value is None: `given[key]` is None then, `given.get(key, x)` is x."""

    def __missing__(self, key: Any) -> None:
        return None


def accepted(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """Columns of a row that the function takes, without those that are None because only other rows have them."""
    parameters, needed = parameters_of(function), required(function)
    given = {name: _given(value) for name, value in row.items() if value is not None or name in needed}
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    names = {parameter.name for parameter in parameters if _by_name(parameter)}
    return {name: value for name, value in given.items() if name in names}


def _given(value: Any) -> Any:
    if type(value) is dict:
        return Given({name: _given(one) for name, one in value.items() if one is not None})
    return [_given(one) for one in value] if type(value) is list else value


def required(function: Callable[..., Any]) -> list[str]:
    parameters = parameters_of(function) or ()
    return [one.name for one in parameters if one.default is one.empty and _by_name(one)]


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def library(name: str, distribution: str) -> ModuleType:
    """The package that an adapter needs; ImportError, with the command that installs it, if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        hint = f"Install it with: pip install {distribution}"
        raise ImportError(f"{name} cannot be imported ({error}). {hint}") from error


def checked_observation(value: Any, where: str) -> Observation | None:
    """A checked copy of an observation: text, messages or None; an image or a list with images becomes parts."""
    if value is None or isinstance(value, str):
        return value
    if is_conversational(value) and all(isinstance(one, dict) and "role" in one for one in value):
        return copy.deepcopy(value)
    if (parts := parts_of(value, sys.maxsize)) is not None:
        return copy.deepcopy(parts)  # an environment may draw its next image over this one
    raise EnvironmentFailed(
        f"{where} returned {format_value(value)}; it must return text, an image, a list of text and images, a list of"
        " messages with 'role' and 'content', or None"
    )


def checked_step(value: Any, where: str) -> tuple[Observation | None, float | None, bool, bool]:
    """`(observation, reward, done, truncated)` from the value of a text environment's `step`; truncated implies done.

    `step` returns `(observation, reward, done, info)`, or gymnasium's `(observation, reward, terminated, truncated,
    info)`.
    """
    if not isinstance(value, tuple) or len(value) not in (4, 5):
        raise EnvironmentFailed(
            f"{where} returned {format_value(value)}; it must return (observation, reward, done, info) or"
            " (observation, reward, terminated, truncated, info)"
        )
    done, truncated = value[2], value[3] if len(value) == 5 else False
    for flag in (done, truncated):
        if not isinstance(flag, bool) and type(flag).__name__ not in ("bool", "bool_"):  # numpy's has another name
            raise EnvironmentFailed(f"{where} returned {format_value(flag)} where it says whether the episode is over")
    observation, reward = checked_observation(value[0], where), checked_number(value[1], where)
    if observation is None and not (done or truncated):
        raise EnvironmentFailed(f"{where} returned no observation, although the episode continues")
    return observation, reward, bool(done or truncated), bool(truncated and not done)


def checked_reward(value: Any, where: str) -> Reward:
    """A checked reward: a number, None, or a list of `(end, reward)` for steps of the completion."""
    if isinstance(value, list):
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            raise EnvironmentFailed(f"{where} returned {format_value(value)}; steps are a list of (end, reward)")
        return [(end, checked_number(reward, where)) for end, reward in value]
    return checked_number(value, where)


def checked_number(value: Any, name: str) -> float | None:
    """A checked reward: a finite number of Python, numpy or torch as a float, or None."""
    if value is None:
        return None
    number = value
    if not isinstance(number, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise EnvironmentFailed(f"{name} returned the reward {format_value(value)}; it must be a finite number or None")
    return float(number)


def initial_prompt(prompt: Any, opening: Observation | None) -> list[Message]:
    """The prompt of an episode: the row's prompt, followed by the observation that the environment's `reset` returned.

    If there is neither, it is an empty message of a user.
    """
    if prompt is None or prompt == []:
        return as_messages(opening or "")
    if not is_conversational(prompt):
        raise EnvironmentFailed(f"an environment needs a prompt of messages, and the row's is {format_value(prompt)}")
    messages: list[Message] = copy.deepcopy(prompt)
    if opening is None or opening == "":
        return messages
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None or _is_messages(opening):
        return messages + as_messages(opening)
    content = last.get("content")
    if isinstance(content, list) or not isinstance(opening, str):
        last["content"] = [*as_parts(content), *as_parts(opening)]
    else:
        last["content"] = (content or "") + opening
    return messages


def as_messages(observation: Observation) -> list[Message]:
    if not isinstance(observation, str) and _is_messages(observation):
        return list(observation)
    return [{"role": "user", "content": observation}]


def _is_messages(observation: Observation) -> bool:
    return not isinstance(observation, str) and all("role" in one for one in observation)
