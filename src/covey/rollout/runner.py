"""Plays rollouts that are more than one completion: siblings side by side, each to its end, whatever it comes to.

A rollout that fails is an outcome like another (`FinishReason.ERROR`); what the engine raises ends the batch. Not here:
what plays (`agent`, `environments`, `functions`), which rollouts there are (`collector`).
"""

import asyncio
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from covey.core.engine import RolloutEngine, SamplingParams, traits_of
from covey.core.rollout import FinishReason, Rollout
from covey.rollout.episode import Ask, EpisodeEngine
from covey.rollout.prompts import PromptCodec, is_conversational
from covey.rollout.request_coalescing import RequestCoalescer
from covey.rollout.tasks import PromptSample, SampleGroup
from covey.rollout.tool_agent import Agent
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import GroupFunction
from covey.rollout.validation import RolloutValidator
from covey.runtime.error_text import describe
from covey.runtime.user_code import Raised, TimedOut, run_in_thread

SALVAGE_SECONDS = 5.0
"""For reading what there is of a rollout that failed."""


class RolloutCallbacks(Protocol):
    """Hears of rollouts as they end, on the thread that samples. `place` is that of the first among all draws."""

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Rollouts that ended at once: one that an agent played, else siblings; with the dataset row of each."""
        ...

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """All siblings, once the last of them has ended."""
        ...


@dataclass(frozen=True)
class RolloutSpec:
    """What plays rollouts that are more than one completion.

    Attributes:
        play: an agent, or a function that plays a group or a whole batch.
        templates: how conversations go on.
        timeout: seconds that one rollout may take.
        limits: of tokens, where the user's code may have written them.
    """

    play: Agent | GroupFunction | BatchFunction
    templates: TurnTemplates
    timeout: float
    limits: RolloutValidator | None = None

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """What these rollouts hold, such as environments, is needed no more: their rewards are scored."""
        release = getattr(self.play, "release", None)
        if release is not None:
            release(rollouts)

    def close(self) -> None:
        """No rollout is under way any more, nor about to be."""
        close = getattr(self.play, "close", None)
        if close is not None:
            close()


class SubmissionBarrier:
    """Knows when the engine has the first request of every rollout of a batch.

    A rollout that has ended without one counts, and one that takes its time is not waited for: its requests may be
    sampled with newer weights, as those of later turns are.
    """

    SECONDS = 1.0

    def __init__(self) -> None:
        self._awaited: set[object] = set()
        self._none_left = asyncio.Event()

    @contextmanager
    def awaited(self) -> Iterator[Callable[[], None]]:
        """A rollout is played within this context; to be called when one of its requests is sent."""
        one = object()
        self._awaited.add(one)

        def sent() -> None:
            self._awaited.discard(one)
            if not self._awaited:
                self._none_left.set()

        try:
            yield sent
        finally:
            sent()

    async def all_sent(self) -> None:
        """Wait until there is none left that is awaited, for a while."""
        await asyncio.sleep(0)  # those that begin in this turn of the loop are awaited
        if self._awaited:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), self.SECONDS)


@dataclass(frozen=True)
class GroupRunner:
    """How the rollouts of one batch are played.

    Attributes:
        engine: what samples.
        codec: of the prompts.
        agency: what plays.
        params: how to sample.
        seed_key: names the batch.
        ended: hears of rollouts as they end.
        first: hears of their first requests.
    """

    engine: RolloutEngine
    codec: PromptCodec
    agency: RolloutSpec
    params: SamplingParams
    seed_key: tuple[int | str, ...]
    ended: RolloutCallbacks | None
    first: SubmissionBarrier = field(default_factory=SubmissionBarrier)

    async def group(self, group: SampleGroup) -> list[Rollout]:
        """The rollouts of one prompt, in the order of their draws, failed ones among them.

        Raises:
            Exception: the engine failed, which is no fault of a rollout's.
        """
        merged = RequestCoalescer(self.engine)

        async def play(begin: int, draws: list[PromptSample]) -> list[Rollout]:
            with self.first.awaited() as sent:
                rollouts = await self._together(group.number, draws, partial(merged.generate, sent=sent))
            if self.ended is not None:
                self.ended.on_rollouts(group.place + begin, [draw.row for draw in draws], rollouts)
            return rollouts

        size = len(group.draws) if isinstance(self.agency.play, GroupFunction) else 1
        begins = range(0, len(group.draws), size)
        playing = [asyncio.ensure_future(play(begin, group.draws[begin : begin + size])) for begin in begins]
        try:
            return [rollout for rollouts in await asyncio.gather(*playing) for rollout in rollouts]
        finally:
            for one in playing:
                one.cancel()  # siblings of one that met the engine's failure
            merged.close()

    async def _together(self, number: int, draws: list[PromptSample], ask: Ask) -> list[Rollout]:
        """One rollout, or the siblings that one function plays together, whatever becomes of them."""
        first, play, timeout = draws[0], self.agency.play, self.agency.timeout
        assert not isinstance(play, BatchFunction), "played as a whole"
        row = _own_copy(first.row)
        key = (*self.seed_key, first.prompt, first.sample)
        expands = traits_of(self.engine).expands_images
        engine = EpisodeEngine(ask, self.agency.templates, self.params, key, row, first.sample, expands)
        began = perf_counter()
        try:
            async with asyncio.timeout(timeout) as engine.clock:
                if isinstance(play, GroupFunction):
                    rollouts = await play(row, engine, len(draws))
                else:
                    rollouts = [await play(row, engine)]
        except Exception as error:
            what = _describe(error, timeout)
            rollouts = [await self._failed(draw.row, engine, what) for draw in draws]
        finally:
            engine.close()  # what the rollout has left behind may be at work still
        if engine.failure is not None:
            raise engine.failure
        for rollout in rollouts:
            rollout.group, rollout.seconds = number, perf_counter() - began
        return rollouts

    async def _failed(self, row: dict[str, Any], engine: EpisodeEngine, error: str) -> Rollout:
        """What there was until something failed, if that is a rollout."""
        limits = self.agency.limits

        def salvaged() -> Rollout:
            rollout = engine.episodes[0].done(FinishReason.ERROR, error)
            return rollout if limits is None else limits.checked(rollout)

        if engine.episodes:
            with suppress(Raised, TimedOut):  # the user's code may have put anything into its episode
                return await run_in_thread(salvaged, SALVAGE_SECONDS)
        try:
            return failed_rollout(self.codec, row, error, self.codec.read_row(row).ids)
        except ValueError as no_prompt:
            return failed_rollout(self.codec, row, f"{error} (and {no_prompt})")


def failed_rollout(codec: PromptCodec, row: dict[str, Any], error: str, prompt_ids: list[int] | None = None) -> Rollout:
    """A rollout in which the policy said nothing.

    Args:
        codec: of the prompts.
        row: of the dataset.
        error: what failed, in words.
        prompt_ids: of the prompt, if it has any that can be had.
    """
    completion: Any = [] if is_conversational(row.get("prompt")) else ""
    ids = prompt_ids or [codec.tokenizer.eos_token_id or 0]
    return Rollout(ids, [], [], [], completion, FinishReason.ERROR, entropies=[], versions=[], error=error)


def _own_copy(row: dict[str, Any]) -> dict[str, Any]:
    """What a rollout does to its row is no business of its siblings; what cannot be copied they share."""

    def copied(value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception:  # whatever `__deepcopy__` of a user's class raises
            return value

    return {name: copied(value) for name, value in row.items()}


def _describe(error: BaseException, timeout: float) -> str:
    """What failed, in words."""
    if isinstance(error, TimedOut | TimeoutError):
        return f"the rollout took longer than rollout_timeout={timeout:g} s"
    return error.told() if isinstance(error, Raised) else describe(error)
