"""Games of several seats: environments with `roles`, of which the policy plays those that no opponent has."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.rollout.environments import interface
from covey.rollout.environments.agent import REWARD, RewardSource
from covey.rollout.episode import EpisodeEngine
from covey.rollout.table import Played, Players, TableSeat
from covey.rollout.user_functions import GroupFunction, RolloutError, RolloutValidator

METHODS = ("reset", "turn", "observe", "move", "rewards")
"""Methods of a game: `reset(**row)` begins a game, `turn()` returns the role that moves next or None at the end,
`observe(role)` returns what the role is shown before its move, `move(role, text)` makes the move, and `rewards()`
returns each role's reward. An optional `close()` is called at the end; `reset`, `move` and `close` may be async."""


def is_game(factory: Any) -> bool:
    """True for a class of games, or for a factory of games with an attribute `roles`."""
    return callable(factory) and isinstance(getattr(factory, "roles", None), list | tuple)


async def _settled(result: Any) -> None:
    """The result of a game's method, awaited if it is async."""
    if inspect.isawaitable(result):
        await result


class PlayedGame(GroupFunction):
    """Plays games and returns a rollout for each seat of the policy, with its role, reward and outcome."""

    gives_reward, text_only = True, True
    schemas = ()  # no tools, so that no calls are counted

    def __init__(self, factory: Callable[[], Any], timeout: float, limits: RolloutValidator):
        super().__init__(self._play, timeout, limits)
        self.factory, self.roles = factory, tuple(factory.roles)  # type: ignore[attr-defined]
        name = getattr(factory, "reward_name", getattr(factory, "__name__", type(factory).__name__))
        self.sources = [RewardSource(factory, name)]

    def trained(self, seats: Collection[str]) -> list[str]:
        """Roles that the policy plays: no opponent has them, nor another variant of a study."""
        if isinstance(self.factory, TableSeat):
            return self.factory.own
        return [role for role in self.roles if role not in seats]

    async def _play(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """Play one game, whose trained seats are n."""
        trained = self.trained(engine.seats)
        assert n == len(trained), "called for each game"
        run = partial(self._game, row, engine)
        if isinstance(self.factory, TableSeat) and self.factory.meets(engine.seats):
            return await self.factory.meet(engine, run)
        played = await run(dict.fromkeys(trained, engine))
        return [rollout for role in trained for rollout in played[role]]

    async def _game(self, row: dict[str, Any], engine: EpisodeEngine, players: Players) -> Played:
        """One game of `players`, the engines of trained roles; opponents are seats of `engine`."""
        game = self.factory()
        try:
            return await self._moves(game, row, engine, players)
        finally:
            if hasattr(game, "close"):
                await _settled(game.close())

    async def _moves(self, game: Any, row: dict[str, Any], engine: EpisodeEngine, players: Players) -> Played:
        seats: dict[str, Any] = {}  # conversations: an `Episode`, or a `TextConversation` of an opponent
        await _settled(game.reset(**interface.accepted(game.reset, row)))

        def shown(role: str) -> bool:
            """Show the game to a seat; False if the seat's episode has no room for it."""
            observation = interface.checked_observation(game.observe(role), f"{type(game).__name__}.observe")
            if role in seats:
                return bool(seats[role].write(interface.as_messages(observation or "")))
            player = players[role] if role in players else engine.seat(role)
            own = players[role].row if role in players else row
            seats[role] = player.begin(interface.initial_prompt(own.get("prompt"), observation))
            seats[role].role = role  # also of a failed game's rollouts; a `TextConversation` is begun without one
            return True

        cut_off = False
        while not cut_off and (role := game.turn()) is not None:
            if role not in self.roles:
                raise RolloutError(f"{type(game).__name__}.turn gave {role!r}; its roles are {', '.join(self.roles)}.")
            if shown(role):
                reply = await seats[role].sample()
                await _settled(game.move(role, reply.text))
                cut_off = role in players and reply.finish is not FinishReason.STOP
            else:
                cut_off = True
        for role in players:
            if role not in seats:  # the game was over before its first move
                shown(role)
        name, outcome = type(game).__name__, getattr(game, "outcome", None)
        rewards = checked_rewards(game.rewards(), self.roles, f"{name}.rewards")
        extras = {} if outcome is None else {"outcome": str(outcome)}
        return {role: [seats[role].done(**extras, **{REWARD: rewards.get(role)})] for role in players}


def checked_rewards(rewards: Any, roles: Sequence[str], name: str) -> dict[str, float | None]:
    """The reward of each role as a number, None for none; RolloutError for something else or another role."""
    if not isinstance(rewards, Mapping):
        raise RolloutError(f"{name} gave {rewards!r:.60}; it must return a dictionary, the reward of each role.")
    if unknown := [role for role in rewards if role not in roles]:
        raise RolloutError(f"{name} gave a reward to {unknown[0]!r}; the roles are {', '.join(roles)}.")
    return {role: interface.checked_number(reward, name) for role, reward in rewards.items()}
