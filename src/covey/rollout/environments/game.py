"""Games of several seats: environments with `roles`, of which the policy plays those that no opponent has."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.rollout.environments import interface
from covey.rollout.environments.agent import REWARD, RewardSource
from covey.rollout.episode import Episode, EpisodeEngine
from covey.rollout.seats import TextConversation
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

    def trained(self, seats: Any) -> list[str]:
        """Roles that the policy plays: no opponent has them, nor another variant of a study."""
        if isinstance(self.factory, TableSeat):
            return self.factory.own
        return [role for role in self.roles if role not in seats]

    async def _play(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """Play games one after another, so that seeds do not depend on time, until they have n trained seats."""
        trained = self.trained(engine.seats)
        rollouts: list[Rollout] = []
        for number in range(n // max(len(trained), 1)):
            run = partial(self._game, row, engine, number)
            if isinstance(self.factory, TableSeat) and self.factory.meets(engine.seats):
                rollouts += await self.factory.meet(engine, number, run)
            else:
                played = await run(dict.fromkeys(trained, engine))
                rollouts += [rollout for role in trained for rollout in played[role]]
        return rollouts

    async def _game(self, row: dict[str, Any], engine: EpisodeEngine, number: int, players: Players) -> Played:
        """One game of `players`, the engines of trained roles; opponents are seats of `engine`."""
        game = self.factory()
        try:
            return await self._moves(game, row, engine, number, players)
        finally:
            if hasattr(game, "close"):
                await _settled(game.close())

    async def _moves(
        self, game: Any, row: dict[str, Any], engine: EpisodeEngine, number: int, players: Players
    ) -> Played:
        seats = dict[str, Episode | TextConversation]()
        await _settled(game.reset(**interface.accepted(game.reset, row)))

        def shown(role: str) -> bool:
            """Show the game to a seat; False if the seat's episode has no room for it."""
            observation = interface.checked_observation(game.observe(role), f"{type(game).__name__}.observe")
            if role in seats:
                return seats[role].write(interface.as_messages(observation or ""))
            player = players[role] if role in players else engine.seat(role, number)
            own = players[role].row if role in players else row
            seats[role] = player.begin(interface.initial_prompt(own.get("prompt"), observation))
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
        return {role: [self._rollout(game, role, seats[role], number)] for role in players}

    def _rollout(self, game: Any, role: str, episode: Any, number: int) -> Rollout:
        rewards, outcome = game.rewards(), getattr(game, "outcome", None)
        reward = interface.checked_number(rewards.get(role), f"{type(game).__name__}.rewards")
        extras = {REWARD: reward} | ({} if outcome is None else {"outcome": str(outcome)})
        return episode.done(role=role, game=number, **extras)
