"""Agents that act in a run's environments, built from `environment_factory`."""

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rewards import TurnEnd
from covey.rollout.collector import run_async
from covey.rollout.environments.agent import (
    OBJECTS,
    REWARD,
    EnvironmentAgent,
    TextEnvironmentAgent,
    ToolEnvironmentAgent,
)
from covey.rollout.environments.interface import EnvironmentFailed, required, tool_methods
from covey.rollout.environments.pool import EnvironmentPool, EnvironmentWarning
from covey.rollout.tools.tool import Tool
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from covey.runtime.user_code import format_error


class PlayedEnvironment(RolloutFunction):
    """An environment that plays whole rollouts itself: an object with `async play(row, engine)`.

    Args:
        environment: plays, and is closed at the end if it has a `close`.
        timeout: seconds that one rollout may take.
        limits: of its tokens.
    """

    gives_reward = True

    def __init__(self, environment: Any, timeout: float, limits: RolloutValidator):
        super().__init__(environment.play, timeout, limits)
        self._environment = environment
        self._at_end = weakref.finalize(self, _close, environment)

    def close(self) -> None:
        """Close the environment; what goes wrong is a warning."""
        _close(self._environment)


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    try:
        if callable(close):
            close()
    except Exception as error:
        message = f"an environment could not be closed: {format_error(error)}."
        warnings.warn(message, EnvironmentWarning, stacklevel=3)


EnvironmentPlayer = EnvironmentAgent | PlayedEnvironment


def build_environment(
    args: Any,
    factory: Any,
    tools: Sequence[Callable[..., Any] | Tool],
    limits: RolloutValidator,
    parser: Callable[..., Any],
) -> EnvironmentPlayer:
    """The agent for the environments that a factory returns.

    Args:
        args: the config.
        factory: makes one environment, called without arguments; or an object that plays rollouts itself.
        tools: further tools, for environments whose methods are tools.
        limits: of a rollout's tokens.
        parser: (schemas of tools) -> how the model writes calls.

    Raises:
        ValueError: no factory, or one that makes nothing that can be played.
    """
    if not isinstance(factory, type) and inspect.iscoroutinefunction(getattr(factory, "play", None)):
        _refuse_tools(tools, type(factory).__name__)
        return PlayedEnvironment(factory, args.rollout_timeout, limits)
    if not callable(factory) or isinstance(factory, str):
        raise ValueError(
            f"`environment_factory` must be a class or a function that makes an environment, got an object of the type"
            f" {type(factory).__name__}. Every rollout needs an environment of its own."
        )
    pool = EnvironmentPool(factory, args.tool_timeout, getattr(factory, "max_environments", None))
    example = _first(pool)
    kind = type(example).__name__
    if not callable(getattr(example, "reset", None)):
        raise ValueError(f"`environment_factory` made a {kind}, which has no method `reset(**row)`.")
    if callable(getattr(example, "step", None)):
        _refuse_tools(tools, kind)
        max_turns = _setting(factory, example, "max_turns", args.max_tool_calling_iterations)
        turn_end = TurnEnd if _setting(factory, example, "turn_rewards", False) else None
        return TextEnvironmentAgent(pool, max_turns, turn_end, required(example.reset))
    methods = tool_methods(example)
    if not methods:
        raise ValueError(
            f"`environment_factory` made a {kind}, which the policy can do nothing with: it has neither public methods"
            " to call as tools nor `step(text)`."
        )
    schemas = [Tool.of(tool).schema for tool in [*methods, *tools]]
    rounds, gives_reward = args.max_tool_calling_iterations, callable(getattr(example, "get_reward", None))
    return ToolEnvironmentAgent(pool, gives_reward, example, parser(schemas), tools, rounds)


def environment(**columns: Any) -> list[Any]:
    """The reward that environments gave their rollouts, as a reward function; their scores become metrics."""
    for scores in columns.get("environment_scores") or ():
        for name, value in (scores or {}).items():
            columns["log_metric"](f"environment/{name}", value)
    return columns.get(REWARD) or [None] * len(columns["completions"])


@dataclass(frozen=True)
class RewardSources:
    """Reward functions with what belongs to each, as `RewardSuite` takes them.

    Attributes:
        functions: None where there are none.
        weights: one for each, or None.
        processing_classes: likewise.
    """

    functions: Any
    weights: Any
    processing_classes: Any

    @classmethod
    def of(cls, functions: Any, weights: Any, processing_classes: Any, player: Any) -> "RewardSources":
        """The user's, and the environment's own behind them where it has one, with weight 1 unless one is given."""
        if not getattr(player, "gives_reward", False):
            return cls(functions, weights, processing_classes)
        listed = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
        if weights is not None and len(weights) == len(listed):
            weights = [*weights, 1.0]
        if processing_classes is not None:
            given = processing_classes if isinstance(processing_classes, list | tuple) else [processing_classes]
            processing_classes = [*given, None]
        return cls([*listed, environment], weights, processing_classes)


def given_by(player: Any) -> set[str]:
    """Arguments of reward functions that come from environments."""
    if isinstance(player, EnvironmentAgent):
        return {OBJECTS} if player.pool.limit is None else set()
    return set()


def check_columns(player: Any, columns: set[str], role: str) -> None:
    """Look whether a dataset has what `reset` asks for.

    Raises:
        ValueError: a column is missing.
    """
    if not isinstance(player, EnvironmentAgent):
        return
    missing = [name for name in player.needs if name not in columns]
    if missing:
        raise ValueError(
            f"`reset` of the environment asks for {', '.join(map(repr, missing))}, and `{role}` has no such column; it"
            f" has {', '.join(sorted(columns))}. Rename the column, or give the argument a default."
        )


def _setting(factory: Any, example: Any, name: str, otherwise: Any) -> Any:
    """An attribute of the factory, or of the class of its environments."""
    for source in (factory, example):
        value = getattr(source, name, None)
        if value is not None:
            return value
    return otherwise


def _first(pool: EnvironmentPool) -> Any:
    """An environment to look at; the first rollout gets it."""
    try:
        lease = run_async(pool.acquire())
    except EnvironmentFailed as failed:
        raise ValueError(f"{failed}. It is called without arguments and must return a new environment.") from failed
    pool.release(lease.environment)
    return lease.environment


def _refuse_tools(tools: Sequence[Any], kind: str) -> None:
    if tools:
        raise ValueError(
            f"`tools` would not be called: a {kind} receives the text of the policy as it is. Leave `tools` out, or"
            " give the environment methods for the policy to call instead of `step`."
        )
