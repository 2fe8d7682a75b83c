"""Runner of rollouts of more than one completion; the rollouts of a group run concurrently."""

import asyncio
import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from covey.core.engine import RolloutEngine, SamplingParams, traits_of
from covey.core.records import FinishReason, PromptSample, Rollout, SampleGroup
from covey.rollout.episode import Episode, EpisodeEngine, Generate
from covey.rollout.prompts import PromptCodec, is_conversational
from covey.rollout.request_coalescing import RequestCoalescer
from covey.rollout.seats import Seats
from covey.rollout.tool_agent import Agent
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import GroupFunction, RolloutError, RolloutFunction, RolloutValidator
from covey.runtime.calling_thread import wait_within
from covey.runtime.deadlines import CallTimeout, LateCalls, StillRunning, run_in_thread
from covey.runtime.user_code import UserCodeError, format_error, place_of

SALVAGE_SECONDS = 5.0  # deadline for reading the tokens of a rollout that failed
EVALUATIONS = (("eval",), ("study",))  # beginnings of the keys of rollout batches that are not trained on
SUBMISSION_SECONDS = 1.0  # wait for first requests; a later one may be sampled with newer weights, like later turns


class RolloutCallbacks(Protocol):
    """Callbacks on the thread that samples; `start` is the index of the first rollout in the batch."""

    def on_rollouts(self, start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Called with rollouts that ended together (one of an agent, else a group) and the dataset row of each."""

    def on_group(self, start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Called with all rollouts of a group, once the last of them has ended."""


class _NoCallbacks:
    def on_rollouts(self, start: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        pass

    on_group = on_rollouts


NO_CALLBACKS = _NoCallbacks()


@dataclass(frozen=True)
class RolloutSpec:
    """The agent or function that plays rollouts of more than one completion."""

    play: Agent | GroupFunction | BatchFunction
    templates: TurnTemplates
    timeout: float  # seconds that one rollout may take
    limits: RolloutValidator | None = None  # for tokens that a user's code returns
    max_turn_length: int | None = None
    trained_turns: str = "all"
    rollouts_per_game: int = 1  # if above 1, a group function is called once per game, as environments of games are
    seats: dict[str, Any] = field(default_factory=dict)  # opponents by name
    eval_seats: dict[str, Any] = field(default_factory=dict)  # replace seats of the same name in evaluations
    late: LateCalls = field(default_factory=partial(LateCalls, "reading a failed rollout"))

    @property
    def calls_functions(self) -> bool:
        """True if ordinary functions or methods of users may be called while rollouts are played."""
        return not isinstance(self.play, RolloutFunction | GroupFunction)

    def rollouts_of_game(self, mode: tuple[int | str, ...]) -> int | None:
        """Number of rollouts of a game, where each game is a call of its own; else None."""
        if not isinstance(self.play, GroupFunction):
            return None
        given = self.rollouts_per_game if self.rollouts_per_game > 1 else None
        return len(self.play.trained(self.seats_of(mode))) or given

    def rollouts_at_once(self, group: int, mode: tuple[int | str, ...]) -> int:
        """Number of rollouts that one call of the agent or function plays."""
        return (self.rollouts_of_game(mode) or group) if isinstance(self.play, GroupFunction) else 1

    def seats_of(self, mode: tuple[int | str, ...]) -> Seats:
        return {**self.seats, **self.eval_seats} if mode in EVALUATIONS else self.seats

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Release resources of rollouts that have been scored, and end their batch."""
        if hasattr(self.play, "release"):
            self.play.release(rollouts)
        if hasattr(self.play, "end_batch"):
            self.play.end_batch()

    def close(self) -> None:
        if hasattr(self.play, "close"):
            self.play.close()


@dataclass(frozen=True)
class GroupRunner:
    """Plays the groups of one rollout batch, whose key is `seed_key`."""

    engine: RolloutEngine
    codec: PromptCodec
    spec: RolloutSpec
    params: SamplingParams
    seed_key: tuple[int | str, ...]
    callbacks: RolloutCallbacks
    first_requests: list[asyncio.Event] = field(default_factory=list)  # of each rollout: the engine has it

    async def play_group(self, group: SampleGroup) -> list[Rollout]:
        coalescer = RequestCoalescer(self.engine)

        async def play(begin: int, samples: list[PromptSample]) -> list[Rollout]:
            sent = asyncio.Event()
            self.first_requests.append(sent)
            try:
                rollouts = await self._play(samples, partial(coalescer.generate, sent=sent.set))
            finally:
                sent.set()
            self.callbacks.on_rollouts(group.start + begin, group.rows[begin : begin + len(samples)], rollouts)
            return rollouts

        size = self.spec.rollouts_at_once(len(group.samples), self.seed_key[1:2])
        begins = range(0, len(group.samples), size)
        tasks = [asyncio.ensure_future(play(begin, group.samples[begin : begin + size])) for begin in begins]
        try:
            return [rollout for rollouts in await asyncio.gather(*tasks) for rollout in rollouts]
        finally:
            for task in tasks:
                task.cancel()  # the others of a group in which the engine failed
            coalescer.close()

    async def all_sent(self) -> None:
        """Wait until the engine has the first request of every rollout, at most `SUBMISSION_SECONDS`."""
        await asyncio.sleep(0)  # rollouts that begin in this turn of the loop are awaited
        with suppress(TimeoutError):
            async with asyncio.timeout(SUBMISSION_SECONDS):
                for sent in self.first_requests:
                    await sent.wait()

    async def _play(self, samples: list[PromptSample], generate: Generate) -> list[Rollout]:
        """One rollout, or all rollouts of a group function; a failure becomes rollouts with `FinishReason.ERROR`."""
        first, play, timeout = samples[0], self.spec.play, self.spec.timeout
        assert not isinstance(play, BatchFunction), "plays whole batches"
        row = {name: _copy(value) for name, value in first.row.items()}
        key = (*self.seed_key, first.prompt, first.sample)
        expands = traits_of(self.engine).expands_images
        most = self.spec.max_turn_length
        seats, together = self.spec.seats_of(self.seed_key[1:2]), self.spec.rollouts_of_game(self.seed_key[1:2])
        params = within(self.params, first)
        engine = EpisodeEngine(generate, self.spec.templates, params, key, row, first.sample, expands, most, seats)
        began = perf_counter()
        try:
            async with asyncio.timeout(timeout) as engine.timeout:
                wait_within(engine.paused_timeout)  # of other rollouts' calls
                if isinstance(play, GroupFunction):
                    rollouts = await play(row, engine, len(samples))
                else:
                    rollouts = [await play(row, engine)]
            _refuse_untrained(rollouts, seats)
        except Exception as error:
            text = error.release() if isinstance(error, UserCodeError) else format_error(error) + place_of(error)
            if isinstance(error, StillRunning):
                text = f"the rollout function failed: {error}"
            elif isinstance(error, TimeoutError):
                text = f"the rollout took longer than rollout_timeout={timeout:g} s"
            roles = _failed_roles(play, seats, engine.episodes, len(samples))
            parts = zip(samples, roles, _episodes_of(roles, engine.episodes), strict=True)
            rollouts = [await self._failed(sample, text, role, episode) for sample, role, episode in parts]
        finally:
            engine.closed = True  # tasks that the rollout started may still be at work
        if engine.failure is not None:
            raise engine.failure
        for rollout in rollouts:
            rollout.seconds = perf_counter() - began
            if (age := engine.ages.get(0 if together else rollout.game)) is not None:
                rollout.extras["opponent_age"] = age
            if together:
                rollout.game = first.sample // together
            if self.spec.trained_turns == "last" and rollout.turn_ends:
                _train_last_turn(rollout)
        return rollouts

    async def _failed(self, sample: PromptSample, error: str, role: str, episode: Episode | None) -> Rollout:
        """The failed rollout of a role, "" for none, with its tokens up to the failure if they can be trained on."""
        limits, row, play = self.spec.limits, sample.row, self.spec.play
        # Of a table, where each of the role's rollouts is a game.
        game = sample.sample if isinstance(play, RolloutFunction) and play.declared else 0

        def salvage() -> Rollout:
            assert episode is not None
            rollout = replace(episode.done(FinishReason.ERROR, error), role=role)
            rollout.game = game or rollout.game
            return rollout if limits is None else limits.checked(rollout)

        if episode is not None:
            with suppress(UserCodeError, CallTimeout):  # the user's code may have put anything into its episode
                return await run_in_thread(salvage, SALVAGE_SECONDS, self.spec.late)
        try:
            failed = failed_rollout(self.codec, row, error, self.codec.read_row(row).ids)
        except ValueError as no_prompt:
            failed = failed_rollout(self.codec, row, f"{error} (and {no_prompt})")
        return replace(failed, role=role, game=game)


def _failed_roles(play: Any, seats: Seats, episodes: Sequence[Episode], n: int) -> list[str]:
    """Roles of the n rollouts of a call that failed: those of the game, else those that its episodes were begun with.

    "" for a rollout whose role is not known.
    """
    declared = [*play.declared] if isinstance(play, RolloutFunction | GroupFunction) else []
    if len(declared) == 1:
        return declared * n
    known = play.trained(seats) if isinstance(play, GroupFunction) else []
    if len(trained := known or declared) == n:
        return trained
    named = [one.role for one in episodes if one.role not in ("", *seats)]
    return [*named[:n], *[""] * (n - len(named))]


def _episodes_of(roles: Sequence[str], episodes: Sequence[Episode]) -> Iterator[Episode | None]:
    """The next episode of each role, None without one; rollouts of one role that no episode has get the first."""
    left = [*episodes]
    if len(set(roles)) == 1 and all(one.role != roles[0] for one in episodes):
        yield from [next(iter(left), None)] * len(roles)
        return
    for role in roles:
        found = next((one for one in left if one.role == role), None)
        yield found
        if found is not None and role:
            left.remove(found)


def _refuse_untrained(rollouts: Iterable[Rollout], seats: Seats) -> None:
    for rollout in rollouts:
        if rollout.role in seats:
            raise RolloutError(
                f"role {rollout.role!r} is a seat (not trained), but the function returned its rollout: leave it out."
            )


def within(params: SamplingParams, sample: PromptSample) -> SamplingParams:
    """Sampling settings with `max_tokens` of the sample's source, if it has a limit."""
    limit = sample.max_tokens
    return params if limit is None or limit >= params.max_tokens else replace(params, max_tokens=limit)


def failed_rollout(codec: PromptCodec, row: dict[str, Any], error: str, prompt_ids: list[int] | None = None) -> Rollout:
    """A failed rollout without a completion; without `prompt_ids` (they cannot be encoded) its prompt is one token."""
    completion: Any = [] if is_conversational(row.get("prompt")) else ""
    ids = prompt_ids or [codec.tokenizer.eos_token_id or 0]
    return Rollout(ids, [], [], [], completion, FinishReason.ERROR, entropies=[], versions=[], error=error)


def _train_last_turn(rollout: Rollout) -> None:
    """Train only on the last turn, in the order of time; the tokens of earlier turns become context."""
    last = rollout.turn_ends[-1]
    begins = [0, *(end + 1 for end in rollout.turn_ends if end < last), *(start for start, _ in rollout.strands)]
    turn = range(max(begin for begin in begins if begin <= last), last + 1)
    rollout.sampled = [sampled and index in turn for index, sampled in enumerate(rollout.sampled)]


def _copy(value: Any) -> Any:
    """A deep copy, so that rollouts of a group cannot affect each other; values that cannot be copied are shared."""
    try:
        return copy.deepcopy(value)
    except Exception:  # `__deepcopy__` of a user's class may raise anything
        return value
