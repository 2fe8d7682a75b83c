"""Environments: objects that rollouts act in, one per rollout; and adapters for environments of other libraries."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.rollout.environments.agent import EnvironmentAgent as EnvironmentAgent
from covey.rollout.environments.agent import TextEnvironmentAgent as TextEnvironmentAgent
from covey.rollout.environments.agent import ToolEnvironmentAgent as ToolEnvironmentAgent
from covey.rollout.environments.gym import GymEnvironment as GymEnvironment
from covey.rollout.environments.interface import EnvironmentFailed as EnvironmentFailed
from covey.rollout.environments.openenv import OpenEnvGame as OpenEnvGame
from covey.rollout.environments.openenv import OpenEnvironment as OpenEnvironment
from covey.rollout.environments.pool import EnvironmentPool as EnvironmentPool
from covey.rollout.environments.pool import EnvironmentWarning as EnvironmentWarning

if TYPE_CHECKING:
    from covey.rollout.environments.verifiers import VerifiersEnvironment as VerifiersEnvironment


def __getattr__(name: str) -> Any:
    if name != "VerifiersEnvironment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.verifiers").VerifiersEnvironment  # which needs this package's other modules
