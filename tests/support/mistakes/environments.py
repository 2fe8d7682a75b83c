"""Mistakes about environments."""

import sys
from typing import Any

from covey.rollout.environments import EnvironmentWarning, GymEnvironment, OpenEnvironment
from covey.rollout.user_functions import RolloutError
from covey.trainer.rollout_reports import RolloutWarning
from tests.support import tiny
from tests.support.mistakes.agents import conversations, nobody
from tests.support.mistakes.cases import TRAINING, Bench, Mistake, checked
from tests.trainer.agents.test_tools import add


class Walk:
    """An environment with a tool and a reward."""

    def reset(self, **row):
        pass

    def step_on(self) -> str:
        """Take a step."""
        return "ok"

    def get_reward(self):
        return 1.0


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


class Undescribed(Walk):
    def helper(self, what):
        return what


class Asks(Walk):
    def reset(self, board, **row):
        pass


class Talks:
    def reset(self):
        return "hello"

    def step(self, text):
        return "on", 1.0, True, {}


class Silent(Walk):
    get_reward = None


class Fails(Walk):
    def reset(self, **row):
        raise OSError("no server")


class Clings(Talks):
    def close(self):
        raise OSError("still there")


class Full:
    """An OpenEnv client whose server has no session left."""

    def reset(self):
        raise RuntimeError("Server error: Server at capacity: 1/1 sessions active. (code: CAPACITY_REACHED)")

    def close(self):
        pass


def acting(bench: Bench, factory: Any, **arguments: Any) -> Any:
    """A trainer of environments, on conversations."""
    return conversations(bench, environment_factory=factory, **arguments)


def without_library(bench: Bench) -> Any:
    """As where openenv is not installed."""
    known = sys.modules.get("openenv.core")
    sys.modules["openenv.core"] = None  # type: ignore[assignment]
    try:
        return acting(bench, OpenEnvironment("http://localhost:8000", "message"))
    finally:
        del sys.modules["openenv.core"]
        if known is not None:
            sys.modules["openenv.core"] = known


shared = Talks()

ENVIRONMENTS = [
    checked(
        "Gave an environment instead of a factory",
        lambda b: acting(b, Walk()),
        "player-type",
        "`environment_factory` .* Walk",
    ),
    checked(
        "Gave an environment_factory that fails",
        lambda b: acting(b, lambda board: Walk()),
        "environment-fails",
        "environment_factory .*TypeError",
    ),
    checked(
        "Gave an adapter without its library",
        without_library,
        "environment-fails",
        "openenv.core",
        "pip install openenv",
    ),
    checked(
        "Gave an environment without reset",
        lambda b: acting(b, NoReset),
        "environment-methods",
        "NoReset.*`reset",
    ),
    checked(
        "Gave environments by name, and a row that names none of them",
        lambda b: acting(b, {"walk": Walk, "talk": Talks}),
        "environment-name",
        "row 0 of `train_dataset`",
        "None",
        "'walk', 'talk'",
    ),
    checked(
        "Gave environments by names that are no text",
        lambda b: acting(b, {1: Walk}),
        "player-type",
        r"\[1\]",
    ),
    Mistake(
        "Gave an environment a method without type hints or docstring", lambda b: acting(b, Undescribed), ("'helper'",)
    ),
    checked(
        "Gave an environment whose reset asks for a column that is not there",
        lambda b: acting(b, Asks),
        "column-reset",
        "'board'",
        "`train_dataset`",
        "answer, prompt",
    ),
    checked(
        "Gave an environment and prompts that are strings",
        lambda b: acting(b, Walk, train_dataset=tiny.rows()),
        "prompt-messages",
        "row 0 of `train_dataset`",
        '"role": "user"',
    ),
    checked(
        "Gave a text environment and tools",
        lambda b: acting(b, Talks, tools=[add]),
        "players-several",
        "`tools`",
        " Talks ",
    ),
    checked(
        "Gave a rollout_func and an environment_factory",
        lambda b: acting(b, Walk, rollout_func=nobody),
        "players-several",
        "`rollout_func` .*`environment_factory`",
    ),
    checked(
        "Gave an environment without rewards and no reward_funcs",
        lambda b: acting(b, Silent, reward_funcs=None),
        "reward-missing",
        "`reward_funcs`",
        "`get_reward`",
    ),
    Mistake(
        "Gave one environment for all rollouts",
        lambda b: acting(b, lambda: shared).train(),
        ("rollouts failed",),
        when=TRAINING,
        kind=RolloutWarning,
    ),
    Mistake(
        "Ran environments that all fail",
        lambda b: acting(b, Fails).train(),
        (r"Fails\.reset", "OSError"),
        when=TRAINING,
        kind=RolloutError,
    ),
    Mistake(
        "Ran an environment that cannot be closed",
        lambda b: acting(b, Clings).train(),
        ("could not be closed",),
        when=TRAINING,
        kind=EnvironmentWarning,
    ),
    checked(
        "Gave a gymnasium environment without saying what answers mean",
        lambda b: acting(b, GymEnvironment(lambda: Grid())),
        "environment-fails",
        " 4 directions",
        "actions=",
        "parse=",
    ),
    Mistake(
        "Opened more sessions than an OpenEnv server allows",
        lambda b: acting(b, OpenEnvironment(Full, "message"), train_dataset=[{"reset": {}}] * 8).train(),
        ("CAPACITY_REACHED", "max_environments", "OpenEnvironment"),
        when=TRAINING,
        kind=RolloutError,
    ),
]


class Grid:
    """Attributes of a gymnasium environment that the adapter reads."""

    action_space = "4 directions"
