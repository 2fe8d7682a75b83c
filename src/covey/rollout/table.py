"""Tables: games that several policies play with each other; each policy is trained on its own seats."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from covey.core.records import Rollout
from covey.rollout.episode import EpisodeEngine
from covey.rollout.user_functions import RolloutError
from covey.runtime.user_code import is_async

Players = Mapping[str, EpisodeEngine]  # by role
Played = Mapping[str, Sequence[Rollout]]  # rollouts by role
PlayFunction = Callable[[dict[str, Any], Players], Awaitable[Mapping[str, Any]]]


class Table:
    """A game that several variants of a study play with each other, each with its own policy.

    Args:
        game: a class of games, as for `environment_factory`, or `async (row, players) -> rollouts`, which plays one
            game. `players` is a dictionary of engines by role; the result has for each role a rollout, or a list.
        players: name of the variant that plays each role. A variant may play several roles.

    Example:
        Two adapters that are trained against each other:

            table = Table(TicTacToe, {"first": "white", "second": "black"})
            Study(model, {"white": {}, "black": {}}, args, parts={"environment_factory": table}, ...).train()

    Raises:
        ValueError: `game` is neither a class of games nor such a function, or `players` has roles that it lacks.
    """

    def __init__(self, game: Any, players: Mapping[str, str]):
        roles: Any = getattr(game, "roles", None)
        self.is_game = callable(game) and isinstance(roles, list | tuple)
        if not self.is_game and not (callable(game) and is_async(game)):
            raise ValueError(
                f"a Table plays a class of games with `roles`, or `async def play(row, players)`; got {game!r}."
            )
        named = isinstance(players, Mapping) and all(isinstance(one, str) for one in (*players, *players.values()))
        if not named or not players:
            raise ValueError(f'players={players!r} must name a variant for each role, such as {{"first": "white"}}.')
        if self.is_game and (unknown := [role for role in players if role not in roles]):
            raise ValueError(f"players: the game has no role {unknown[0]!r}; it has {', '.join(map(repr, roles))}.")
        self.game, self.players = game, dict(players)
        self.variants = list(dict.fromkeys(players.values()))
        self._lock = threading.Lock()
        self._games: dict[tuple[Any, ...], _Meeting] = {}
        self._arrivals: Counter[tuple[Any, ...]] = Counter()
        self._left: RolloutError | None = None  # why a variant plays no further games in this round

    def __call__(self, *given: Any) -> Any:
        raise ValueError("a Table is played by variants of a study: give it to covey.study.Study in `parts`.")

    def roles_of(self, variant: str) -> list[str]:
        return [role for role, name in self.players.items() if name == variant]

    def seat(self, variant: str, rollouts_per_game: int) -> "TableSeat":
        """The part that one variant's trainer gets instead of the table."""
        function = SeatedFunction if rollouts_per_game == 1 else SeatedGroupFunction
        return (SeatedGame if self.is_game else function)(self, variant, rollouts_per_game)

    def open(self) -> None:
        """Forget the games of earlier rounds, finished or not."""
        with self._lock:
            self._games.clear()
            self._arrivals.clear()
            self._left = None

    def leave(self, variant: str, error: BaseException) -> None:
        """Fail the games of this round that wait for a variant whose sampling failed."""
        with self._lock:
            self._left = RolloutError(f"{variant} has failed: {error}")
            for meeting in self._games.values():
                meeting.fail(self._left)

    def _meeting(self, variant: str, game: tuple[Any, ...]) -> "_Meeting":
        with self._lock:
            number = self._arrivals[variant, game]  # the same prompt may come twice in a rollout batch
            self._arrivals[variant, game] += 1
            if self._left is not None:
                raise self._left
            return self._games.setdefault((*game, number), _Meeting({name: Future() for name in self.variants}))


@dataclass(eq=False)
class _Meeting:
    """One game: the engines of the variants that have joined it and, at its end, the rollouts."""

    arrived: dict[str, "Future[EpisodeEngine]"]
    played: "Future[Played]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        futures: list[Future[Any]] = [*self.arrived.values(), self.played]
        for future in futures:
            if not future.done():
                future.set_exception(error)


@dataclass(eq=False)
class TableSeat:
    """One variant's part of a table.

    The table's first variant is the host: a game is one coroutine on the host's event loop, with the engines of all
    variants. So its samples do not depend on the order in which variants join.
    """

    table: Table
    variant: str
    rollouts_per_game: int

    @property
    def own(self) -> list[str]:
        """Roles that this variant plays."""
        return self.table.roles_of(self.variant)

    def meets(self, seats: Any) -> bool:
        """False in evaluations where opponents play the roles of the other variants."""
        return not any(role in seats for role in self.table.players)

    async def meet(self, engine: EpisodeEngine, run: Callable[[Players], Awaitable[Played]]) -> list[Rollout]:
        """This variant's rollouts of a game; `run` plays it with the engines of all roles."""
        key = engine.seed_key
        engine.seed_key = (*key, "player", self.variant)  # else all players would use the same random numbers
        game = (*key[1:-1], engine.sibling // self.rollouts_per_game)  # without seed and sample
        meeting = self.table._meeting(self.variant, game)
        if not meeting.arrived[self.variant].done():  # else the host has given up
            meeting.arrived[self.variant].set_result(engine)
        if self.variant == self.table.variants[0]:
            played = await self._host(meeting, run)
        else:
            try:
                played = await asyncio.shield(asyncio.wrap_future(meeting.played))
            except Exception as error:
                raise RolloutError(f"the game failed, as {self.table.variants[0]} reports: {error}") from error
        return [rollout for role in self.own for rollout in played[role]]

    async def _host(self, meeting: _Meeting, run: Callable[[Players], Awaitable[Played]]) -> Played:
        try:
            engines = {name: await asyncio.wrap_future(future) for name, future in meeting.arrived.items()}
            played = await run({role: engines[name] for role, name in self.table.players.items()})
        except BaseException as error:
            task = asyncio.current_task()
            own = isinstance(error, Exception) or (task is not None and task.cancelling() > 0)
            failure = error if isinstance(error, Exception) else RolloutError(f"it was given up ({error!r})")
            meeting.fail(failure)
            if own:
                raise
            raise failure from error  # a player's request was cancelled, as its rollout is late
        if not meeting.played.done():
            meeting.played.set_result(played)
        return played


class SeatedGame(TableSeat):
    """A variant's `environment_factory`: a class of games, of which the variant plays some roles."""

    def __call__(self) -> Any:
        return self.table.game()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.table.game.roles)

    @property
    def reward_name(self) -> str:
        game = self.table.game
        return str(getattr(game, "reward_name", getattr(game, "__name__", type(game).__name__)))


class SeatedFunction(TableSeat):
    """A variant's `rollout_func`: it plays one game and returns the variant's own rollout."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        (rollout,) = await self.play(row, engine)
        return rollout

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> list[Rollout]:
        async def run(players: Players) -> Played:
            return self._by_role(await self.table.game(row, players), engine.sibling // self.rollouts_per_game)

        own = await self.meet(engine, run)
        if len(own) != self.rollouts_per_game:
            raise RolloutError(
                f"the table's function returned {len(own)} rollouts of {self.variant} ({', '.join(self.own)}), whose"
                f" rollouts_per_game is {self.rollouts_per_game}."
            )
        return own

    def _by_role(self, returned: Any, game: int) -> Played:
        roles = self.table.players
        if not isinstance(returned, Mapping) or set(returned) != set(roles):
            got = ", ".join(map(repr, returned)) if isinstance(returned, Mapping) else repr(returned)[:60]
            raise RolloutError(
                f"the table's function returned {got}; it must return a rollout, or a list of rollouts, for each of"
                f" {', '.join(map(repr, roles))}."
            )
        played: dict[str, list[Rollout]] = {}
        for role, given in returned.items():
            own = list(given) if isinstance(given, list | tuple) else [given]
            if wrong := [one for one in own if not isinstance(one, Rollout)]:
                raise RolloutError(f"the table's function returned {wrong[0]!r:.60} for {role!r}, which is no Rollout.")
            played[role] = [replace(one, role=one.role or role, game=game) for one in own]
        return played


class SeatedGroupFunction(SeatedFunction):
    """A variant's `rollout_func`, for a variant with several rollouts per game."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:  # type: ignore[override]
        return await self.play(row, engine)
