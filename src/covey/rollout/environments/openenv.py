"""OpenEnv environments as text environments: `environment_factory=OpenEnvironment("http://localhost:8000", "message")`.

An environment runs in a server of its own, in which each rollout has a session, through OpenEnv's client. Servers are
not started here, and environments with MCP tools are not supported. `OpenEnvGame` is for environments of several
players, each of them a seat.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from covey.core.records import Message
from covey.rollout.environments.interface import instructed, library
from covey.runtime.calling_thread import threaded

NOT_SHOWN = frozenset({"done", "reward", "metadata"})  # fields of an observation that the policy is not shown


@threaded
@dataclass(eq=False)
class OpenEnvironment:
    """Factory of sessions of an OpenEnv server, and of dataset rows to start them from.

    Args:
        client: the server's address, or a function without arguments that makes a client of it.
        action: the name of the action's only field, which gets the policy's text, or a function from text to an action
            of the client. It raises `ValueError` for text that is not an action; the policy is shown the message.
        show: observation -> text or messages for the policy. By default the observation's fields as JSON, or the text
            of its only field.
        instructions: the user's message before the first observation.
        system: a system message, or None.
        invalid_reward: reward of text that is not an action; the environment does not change.
        turn_rewards: reward each turn separately, instead of the completion with the sum.
        max_turns: most turns of the policy.
        max_environments: most sessions at a time, as the server allows (`max_concurrent_envs`, by default 1); rollouts
            wait for a free one. None: one for each rollout.
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
        client = _client(self.client)
        client = client.sync() if hasattr(client, "sync") else client
        return OpenEnvText(client, _parser(self.action), self.show or shown, self.invalid_reward)

    def dataset(
        self, size: int | None = None, seed: int = 0, resets: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Rows for `train_dataset`, each with arguments for `reset` that all rollouts of the row share.

        Args:
            size: number of rows, each with its own seed.
            seed: seed of the first row.
            resets: instead of `size`: the arguments of the environment's `reset` for each row.
        """
        return _rows(self, size, seed, resets)


def _rows(
    environment: Any, size: int | None, seed: int, resets: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    if (size is None) == (resets is None):
        raise ValueError("give either `size`, for rows with a seed each, or `resets`, a list of arguments of `reset`.")
    given = [{"seed": seed + i} for i in range(size or 0)] if resets is None else list(map(dict, resets))
    return [{"prompt": instructed(environment), "reset": one} for one in given]


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


def _parser(action: str | Callable[[str], Any]) -> Callable[[str], Any]:
    return action if callable(action) else lambda text: {action: text}


def _client(given: str | Callable[[], Any]) -> Any:
    return library("openenv.core", "openenv").GenericEnvClient(base_url=given) if isinstance(given, str) else given()


@dataclass(eq=False)
class OpenEnvGame:
    """A game of several players in an OpenEnv server: `environment_factory=OpenEnvGame(url, "move", roles=(...))`.

    Every step of the environment is a move of one role. The policy plays the roles that have no opponent in `seats`.

    Args:
        client: the server's address, or a function without arguments that makes a client of it.
        action: as in `OpenEnvironment`; text that is not an action ends the game.
        roles: names of the players, in the order in which they move if there is no `turn`.
        turn: observation -> the role that moves next, or None at the end; by default all move in turn until the
            environment is done.
        show: (observation, role) -> text or messages for that role; by default the observation as of `OpenEnvironment`.
        rewards: last observation -> reward by role; by default each role has the sum of the rewards of its own moves.
            An answer that is cut off ends a game, so the last observation may be of one that is not over.
        outcome: last observation -> text for the record ("draw" is counted), or None.
        instructions: the user's message before the first observation.
        system: a system message, or None.
        invalid_reward: reward of a role whose text is not an action; the other roles get no reward then.
        max_environments: most sessions at a time, as the server allows; games wait for one. None: one for each game.
    """

    client: str | Callable[[], Any]
    action: str | Callable[[str], Any]
    _: KW_ONLY
    roles: Sequence[str]
    turn: Callable[[Any], str | None] | None = None
    show: Callable[[Any, str], str | list[Message]] | None = None
    rewards: Callable[[Any], Mapping[str, float]] | None = None
    outcome: Callable[[Any], str | None] | None = None
    instructions: str = ""
    system: str | None = None
    invalid_reward: float = -1.0
    max_environments: int | None = None
    reward_name: ClassVar[str] = "environment"
    _free: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self.roles = tuple(self.roles)
        if not self.roles or not all(isinstance(one, str) for one in self.roles):
            raise ValueError(f'roles={self.roles!r} must be names, such as ("first", "second").')

    def __call__(self) -> "OpenEnvMatch":
        return OpenEnvMatch(self)

    def dataset(
        self, size: int | None = None, seed: int = 0, resets: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Rows for `train_dataset`, as of `OpenEnvironment`: the games of a row begin in the same way."""
        return _rows(self, size, seed, resets)

    def sessions(self) -> asyncio.Semaphore | None:
        """Semaphore of free sessions on the running event loop; None: any number."""
        if self.max_environments is None:
            return None
        return self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_environments))


@dataclass(eq=False)
class OpenEnvMatch:
    """One game in a session of an OpenEnv server, with the methods of a game."""

    game: OpenEnvGame
    client: Any = None  # from `reset` to `close`
    observation: Any = None
    done: bool = False
    moves: int = 0
    wrong: str | None = None  # the role whose text was not an action
    earned: dict[str, float | None] = field(default_factory=dict)  # reward by role, if the environment gives rewards

    async def reset(self, reset: dict[str, Any] | None = None) -> None:
        given = {name: value for name, value in (reset or {}).items() if value is not None}  # tables fill up with None
        if (sessions := self.game.sessions()) is not None:
            await sessions.acquire()
        try:
            self.client = _client(self.game.client)
            self._take(await _answer(self.client.reset(**given)))
        except BaseException:
            if self.client is None and sessions is not None:  # else `close` gives the session back
                sessions.release()
            raise

    def turn(self) -> str | None:
        if self.done or self.wrong is not None:
            return None
        if self.game.turn is not None:
            return self.game.turn(self.observation)
        return self.game.roles[self.moves % len(self.game.roles)]

    def observe(self, role: str) -> str | list[Message]:
        return shown(self.observation) if self.game.show is None else self.game.show(self.observation, role)

    async def move(self, role: str, text: str) -> None:
        try:
            action = _parser(self.game.action)(text)
        except ValueError:
            self.wrong = role
            return
        result = await _answer(self.client.step(action))
        self.moves += 1
        self._take(result)
        if result.reward is not None:
            self.earned[role] = (self.earned.get(role) or 0.0) + float(result.reward)

    def rewards(self) -> Mapping[str, float | None]:
        if self.wrong is not None:
            return {self.wrong: self.game.invalid_reward}
        return self.earned if self.game.rewards is None else self.game.rewards(self.observation)

    @property
    def outcome(self) -> str | None:
        if self.wrong is not None:
            return "invalid"
        return None if self.game.outcome is None else self.game.outcome(self.observation)

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is None:
            return
        try:
            with suppress(ConnectionError):  # the server has ended
                await _answer(client.close())
        finally:
            if (sessions := self.game.sessions()) is not None:
                sessions.release()

    def _take(self, result: Any) -> None:
        self.observation, self.done = result.observation, bool(result.done)


async def _answer(result: Any) -> Any:
    """Result of a client's method, which may be async."""
    return await result if inspect.isawaitable(result) else result


def shown(observation: Any) -> str:
    """An observation's fields as JSON; if the only field is text, the text itself."""
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if not isinstance(fields, dict):
        return str(fields)
    visible = {name: value for name, value in fields.items() if name not in NOT_SHOWN and value is not None}
    (only,) = visible.values() if len(visible) == 1 else (None,)
    return only if isinstance(only, str) else json.dumps(visible, ensure_ascii=False, default=str)
