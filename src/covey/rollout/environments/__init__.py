"""Environments: objects that rollouts act in, one for each rollout.

- `agent`: plays a rollout in an environment, from `reset` to the reward: objects whose methods are tools, and objects
  with `step(text)`;
- `pool`: makes, lends and closes the objects, and calls their methods under a deadline;
- `interface`: the methods of an object, and checks of the values that they return;
- `gym`, `openenv`, `verifiers`: environments of these libraries; `endpoint` and `verifiers_harness` serve the last.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.rollout.environments.agent import EnvironmentAgent, TextEnvironmentAgent, ToolEnvironmentAgent
from covey.rollout.environments.interface import EnvironmentFailed
from covey.rollout.environments.pool import EnvironmentPool, EnvironmentWarning

if TYPE_CHECKING:
    from covey.rollout.environments.gym import GymEnvironment as GymEnvironment
    from covey.rollout.environments.openenv import OpenEnvironment as OpenEnvironment
    from covey.rollout.environments.verifiers import VerifiersEnvironment as VerifiersEnvironment

_HOMES = {"GymEnvironment": "gym", "OpenEnvironment": "openenv", "VerifiersEnvironment": "verifiers"}

__all__ = [
    "EnvironmentAgent",
    "EnvironmentFailed",
    "EnvironmentPool",
    "EnvironmentWarning",
    "GymEnvironment",
    "OpenEnvironment",
    "TextEnvironmentAgent",
    "ToolEnvironmentAgent",
    "VerifiersEnvironment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
