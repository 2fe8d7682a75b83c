"""Environments: objects that rollouts act in, one for each rollout.

- `agent`: plays a rollout in an environment, from `reset` to the reward: objects whose methods are tools, and objects
  with `step(text)`;
- `pool`: makes, lends and closes the objects;
- `calls`: calls their methods under a deadline;
- `methods`, `results`: what an object offers, and whether what it returns can be used.
"""

from covey.rollout.environments.agent import EnvironmentAgent, TextEnvironmentAgent, ToolEnvironmentAgent
from covey.rollout.environments.calls import EnvironmentFailed
from covey.rollout.environments.pool import EnvironmentPool, EnvironmentWarning

__all__ = [
    "EnvironmentAgent",
    "EnvironmentFailed",
    "EnvironmentPool",
    "EnvironmentWarning",
    "TextEnvironmentAgent",
    "ToolEnvironmentAgent",
]
