"""OpenEnv environments as text environments: `environment_factory=OpenEnvironment("http://localhost:8000", "message")`.

An environment runs in a server of its own; each rollout has a session there, through OpenEnv's client. Servers are not
started here, and environments with MCP tools are not supported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from covey.core.records import Message
from covey.rollout.environments.interface import instructed, library
from covey.runtime.calling_thread import threaded

NOT_SHOWN = frozenset({"done", "reward", "metadata"})  # fields of an observation that the policy is not shown


@threaded
@dataclass(eq=False)
class OpenEnvironment:
    """Opens sessions of an OpenEnv server; gives the rows that they start from.

    Args:
        client: the server's address, or a function without arguments that makes a client of it.
        action: the name of the action's one field, which gets the policy's text, or a function from text to an action
            of the client. It raises `ValueError` for text that is no action; the policy is shown its message.
        show: observation -> text or messages for the policy. By default the observation's fields as JSON, or the text
            of its only field.
        instructions: the user's message before the first observation.
        system: a system message, or None.
        invalid_reward: of text that is no action; the environment does not change.
        turn_rewards: give the reward of each turn to that turn rather than their sum to the whole.
        max_turns: turns of the policy.
        max_environments: sessions that the server allows at a time (its `max_concurrent_envs`, 1 unless the server says
            otherwise); rollouts wait for one. None: one for each rollout.
    """

    client: str | Callable[[], Any]
    action: str | Callable[[str], Any]
    _: KW_ONLY
    show: Callable[[Any], str | list[Message]] | None = None
    instructions: str = ""
    system: str | None = None
    invalid_reward: float = 0.0
    turn_rewards: bool = False
    max_turns: int | None = None
    max_environments: int | None = None

    def __call__(self) -> "OpenEnvText":
        action, field = self.action, str(self.action)
        parse = action if callable(action) else lambda text: {field: text}
        if isinstance(self.client, str):
            client = library("openenv.core", "openenv").GenericEnvClient(base_url=self.client)
        else:
            client = self.client()
        client = client.sync() if hasattr(client, "sync") else client
        return OpenEnvText(client, parse, self.show or shown, self.invalid_reward)

    def dataset(
        self, size: int | None = None, seed: int = 0, resets: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Rows for `train_dataset`, each with arguments for `reset` that all its rollouts share.

        Args:
            size: how many, each with a seed of its own.
            seed: of the first.
            resets: instead of a size: what each row gives to the environment's `reset`.
        """
        if (size is None) == (resets is None):
            raise ValueError(
                "give either `size`, for rows with a seed each, or `resets`, a list of arguments of `reset`."
            )
        given = [{"seed": seed + i} for i in range(size or 0)] if resets is None else list(map(dict, resets))
        return [{"prompt": instructed(self), "reset": one} for one in given]


@dataclass(eq=False)
class OpenEnvText:
    """One session of an OpenEnv server with `step(text)`."""

    reward_name: ClassVar[str] = "environment"

    client: Any
    parse: Callable[[str], Any]
    show: Callable[[Any], str | list[Message]]
    invalid_reward: float

    # The argument is a column of the rows, named after the method.
    def reset(self, reset: dict[str, Any] | None = None) -> str | list[Message]:
        given = {name: value for name, value in (reset or {}).items() if value is not None}  # tables fill up with None
        try:
            result = self.client.reset(**given)
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            raise RuntimeError(f"{error} Set max_environments of OpenEnvironment to what the server allows.") from error
        return self.show(result.observation)

    def step(self, text: str) -> tuple[str | list[Message], Any, bool, dict[str, Any]]:
        try:
            action = self.parse(text)
        except ValueError as error:
            return str(error), self.invalid_reward, False, {"invalid": True}
        result = self.client.step(action)
        return self.show(result.observation), result.reward, bool(result.done), {}

    def close(self) -> None:
        self.client.close()


def shown(observation: Any) -> str:
    """An observation's fields as JSON; the text itself where there is one field and it is text."""
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if not isinstance(fields, dict):
        return str(fields)
    visible = {name: value for name, value in fields.items() if name not in NOT_SHOWN and value is not None}
    (only,) = visible.values() if len(visible) == 1 else (None,)
    return only if isinstance(only, str) else json.dumps(visible, ensure_ascii=False, default=str)
