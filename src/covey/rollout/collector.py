"""Runs a batch of rollouts to their end: draws in, finished episodes out.

Everything is in flight at once and the engine batches what it is given. The plain rollout is one completion; siblings
are then one request, so that their prompt is computed once. With an agent (`covey.rollout.agent`) every rollout is a
coroutine of its own, which goes on as fast as its tools and turns allow; one that fails is an outcome like another
(`FinishReason.ERROR`), while what the engine raises ends the batch.
"""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeVar

from covey.core.failures import describe
from covey.core.rollout import Completion, FinishReason, Rollout
from covey.rollout.agent import Agent
from covey.rollout.background import SamplingThread
from covey.rollout.batch_function import BatchFunction
from covey.rollout.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.rollout.episode import EpisodeEngine
from covey.rollout.functions import GroupFunction
from covey.rollout.merging import MergedRequests
from covey.rollout.prompts import PromptCodec, is_conversational
from covey.rollout.seeds import sample_seed
from covey.rollout.speculation import Speculation
from covey.rollout.tools.execution import Raised, TimedOut
from covey.rollout.tools.template import TurnTemplates

T = TypeVar("T")


class Ended(Protocol):
    """Hears of rollouts as they end, on the thread that samples. `place` is that of the first among all draws."""

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Rollouts that ended at once: one that an agent played, else siblings; with the dataset row of each."""
        ...

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """All siblings, once the last of them has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """One completion to be sampled.

    Attributes:
        row: the dataset row; `row["prompt"]` is the prompt.
        prompt: the row's number, which seeds the sample.
        sample: which of the prompt's completions this is, 0 ... G-1.
    """

    row: dict[str, Any]
    prompt: int
    sample: int


@dataclass(frozen=True)
class Siblings:
    """Draws of one prompt, next to each other.

    Attributes:
        number: among the groups of the batch.
        place: of the first among the draws of the batch.
        draws: one or more.
    """

    number: int
    place: int
    draws: list[Draw]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset row of each."""
        return [draw.row for draw in self.draws]


@dataclass(frozen=True)
class Agency:
    """What plays rollouts that are more than one completion.

    Attributes:
        play: an agent, or a function that plays a group or a whole batch.
        templates: how conversations go on.
        timeout: seconds that one rollout may take.
    """

    play: Agent | GroupFunction | BatchFunction
    templates: TurnTemplates
    timeout: float

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


class Collector:
    """Turns draws into rollouts with one engine.

    Args:
        engine: what samples.
        codec: encodes prompts and decodes completions.
        seed: with the generation's number, the prompt and the sample index, it decides every sample; with exact
            reuse, without the generation's number.
        agency: what plays the rollouts; None: each is one completion.
    """

    def __init__(self, engine: RolloutEngine, codec: PromptCodec, seed: int, agency: Agency | None = None):
        self.engine = engine
        self.codec = codec
        self.seed = seed
        self.agency = agency
        self.run: Callable[[Coroutine[Any, Any, list[Rollout]]], list[Rollout]] = run_async
        self._sampling = 0
        self._waking = ExitStack()

    def collect(
        self,
        draws: Sequence[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        ended: Ended | None = None,
    ) -> list[Rollout]:
        """Sample every draw; the result is in the draws' order.

        Args:
            draws: siblings (equal `prompt`) next to each other.
            params: how to sample.
            key: names this generation (mode and step): another key gives other samples, unless `reuse` is exact.
            reuse: earlier completions to begin with; these take their place.
            ended: hears of rollouts as they end.
        """
        rollouts = self.run(self.sample(draws, params, key, reuse, ended=ended))
        if reuse is not None:
            reuse.remember([draw.prompt for draw in draws], [draw.sample for draw in draws], rollouts)
        return rollouts

    async def sample(
        self,
        draws: Sequence[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        submitted: Callable[[], None] = lambda: None,
        ended: Ended | None = None,
    ) -> list[Rollout]:
        """The same as a coroutine, which only reads `reuse`.

        Args:
            draws, params, key, reuse, ended: as for `collect`.
            submitted: called when every request has been handed to the engine.
        """
        with self._awake():  # here, since gradient mode and autocast belong to the thread that runs this
            if self.agency is not None and isinstance(self.agency.play, BatchFunction):
                submitted()
                return await self._batch(self.agency.play, draws, params, key, ended)
            groups = [
                asyncio.ensure_future(self._group(siblings, params, key, reuse, ended)) for siblings in _siblings(draws)
            ]
            try:
                await asyncio.sleep(0)  # each group goes as far as it can, which is into the engine
                submitted()
                answered = await asyncio.gather(*groups)
            finally:
                for group in groups:
                    group.cancel()  # siblings of one that failed
        return _numbered([rollout for rollouts in answered for rollout in rollouts])

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The engine is awake from the first of several batches that are sampled at once to the last."""
        if not self._sampling:
            self._waking.enter_context(self.engine.awake())
        self._sampling += 1
        with ExitStack() as batch:
            batch.push(self._end_batch)
            yield

    def _end_batch(self, *raised: Any) -> None:
        """With what has ended it, if something has: an engine may have to tell other processes that it failed."""
        self._sampling -= 1
        if not self._sampling:
            self._waking.__exit__(*raised)

    async def _group(
        self,
        group: Siblings,
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None,
        ended: Ended | None,
    ) -> list[Rollout]:
        if self.agency is not None:
            rollouts = await self._play(self.agency, group, params, key, ended)
        else:
            rollouts = await self._complete(group, params, key, reuse)
            if ended is not None:
                ended.on_rollouts(group.place, group.rows, rollouts)
        if ended is not None:
            ended.on_group(group.place, group.rows, rollouts)
        return rollouts

    # ---- rollouts that are one completion --------------------------------------------------------------------------

    async def _complete(
        self,
        group: Siblings,
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None,
    ) -> list[Rollout]:
        siblings, row, prompt = group.draws, group.draws[0].row, group.draws[0].prompt
        prompt_ids = self.codec.encode(row["prompt"], row.get("chat_template_kwargs"))
        key = key if reuse is None else reuse.seed_key(key, prompt_ids)
        seeds = [sample_seed(self.seed, *key, prompt, draw.sample) for draw in siblings]
        request = SampleRequest(prompt_ids, len(siblings), params, seeds)
        if reuse is not None:
            request = reuse.with_drafts(request, prompt, [draw.sample for draw in siblings])
        completions = await self.engine.generate(request)
        return [self._rollout(row, prompt_ids, completion, group.number) for completion in completions]

    def _rollout(self, row: dict[str, Any], prompt_ids: list[int], completion: Completion, group: int) -> Rollout:
        return Rollout(
            prompt_ids=prompt_ids,
            completion_ids=completion.token_ids,
            sampled=[True] * len(completion.token_ids),
            logprobs=completion.logprobs,
            completion=self.codec.decode(row["prompt"], completion.token_ids),
            finish=completion.finish,
            group=group,
            entropies=completion.entropies,
            reused=completion.reused,
            versions=completion.versions,
        )

    # ---- rollouts that agents play ---------------------------------------------------------------------------------

    async def _play(
        self,
        agency: Agency,
        group: Siblings,
        params: SamplingParams,
        key: tuple[int | str, ...],
        ended: Ended | None,
    ) -> list[Rollout]:
        merged = MergedRequests(self.engine)

        async def play(begin: int, draws: list[Draw]) -> list[Rollout]:
            rollouts = await self._play_together(agency, group.number, draws, params, key, merged)
            if ended is not None:
                place = group.place + begin
                ended.on_rollouts(place, [draw.row for draw in draws], rollouts)
            return rollouts

        size = len(group.draws) if isinstance(agency.play, GroupFunction) else 1
        begins = range(0, len(group.draws), size)
        playing = [asyncio.ensure_future(play(begin, group.draws[begin : begin + size])) for begin in begins]
        try:
            return [rollout for rollouts in await asyncio.gather(*playing) for rollout in rollouts]
        finally:
            for one in playing:
                one.cancel()  # siblings of one that met the engine's failure
            merged.close()

    async def _play_together(
        self,
        agency: Agency,
        number: int,
        draws: list[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        merged: MergedRequests,
    ) -> list[Rollout]:
        """One rollout, or the siblings that one function plays together, whatever becomes of them.

        Raises:
            Exception: the engine failed, which is no fault of the rollout's.
        """
        first, play = draws[0], agency.play
        assert not isinstance(play, BatchFunction), "played as a whole"
        row = _own_copy(first.row)
        seed_key = (self.seed, *key, first.prompt, first.sample)
        engine = EpisodeEngine(merged.generate, agency.templates, params, seed_key, row, first.sample)
        began = perf_counter()
        try:
            async with asyncio.timeout(agency.timeout):
                if isinstance(play, GroupFunction):
                    rollouts = await play(row, engine, len(draws))
                else:
                    rollouts = [await play(row, engine)]
        except Exception as error:
            what = _describe(error, agency.timeout)
            rollouts = [self._failed(draw.row, engine, what) for draw in draws]
        if engine.failure is not None:
            raise engine.failure
        for rollout in rollouts:
            rollout.group, rollout.seconds = number, perf_counter() - began
        return rollouts

    def _failed(self, row: dict[str, Any], engine: EpisodeEngine, error: str) -> Rollout:
        """What there was until something failed."""
        if engine.episodes:
            return engine.episodes[0].done(FinishReason.ERROR, error)
        prompt = row.get("prompt")
        try:
            prompt_ids = self.codec.encode(prompt, row.get("chat_template_kwargs"))
        except ValueError as no_prompt:
            error = f"{error} (and {no_prompt})"
            prompt_ids = [self.codec.tokenizer.eos_token_id or 0]
        completion: Any = [] if is_conversational(prompt) else ""
        return Rollout(prompt_ids, [], [], [], completion, FinishReason.ERROR, entropies=[], versions=[], error=error)

    async def _batch(
        self,
        function: BatchFunction,
        draws: Sequence[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        ended: Ended | None,
    ) -> list[Rollout]:
        """All rollouts at once, by a function of the user's."""
        first = [number for draw in draws[:1] for number in (draw.prompt, draw.sample)]  # other processes have others
        with function.sampling(MergedRequests(self.engine), self.codec, params, (self.seed, *key, *first)):
            rollouts = await function([draw.row["prompt"] for draw in draws])
        for group in _siblings(draws):
            mine = rollouts[group.place : group.place + len(group.draws)]
            for rollout in mine:
                rollout.group = group.number
            if ended is not None:
                ended.on_rollouts(group.place, group.rows, mine)
                ended.on_group(group.place, group.rows, mine)
        return _numbered(rollouts)


def _own_copy(row: dict[str, Any]) -> dict[str, Any]:
    """What a rollout does to its row is no business of its siblings; what cannot be copied they share."""

    def copied(value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception:  # whatever `__deepcopy__` of a user's class raises
            return value

    return {name: copied(value) for name, value in row.items()}


def _numbered(rollouts: list[Rollout]) -> list[Rollout]:
    """Groups are numbered anew, so that only rollouts with the same prompt share one (an episode may begin its own)."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    for rollout in rollouts:
        place = rollout.group, tuple(rollout.prompt_ids)
        rollout.group = numbers.setdefault(place, len(numbers))
    return rollouts


def _describe(error: BaseException, timeout: float) -> str:
    """What failed, in words."""
    if isinstance(error, TimedOut | TimeoutError):
        return f"the rollout took longer than rollout_timeout={timeout:g} s"
    return error.text if isinstance(error, Raised) else describe(error)


def _siblings(draws: Sequence[Draw]) -> list[Siblings]:
    """Runs of draws of the same prompt; a prompt drawn again (sample 0 once more) starts a new run."""
    runs: list[Siblings] = []
    for place, draw in enumerate(draws):
        last = runs[-1].draws[-1] if runs else None
        if last is not None and last.prompt == draw.prompt and last.sample < draw.sample:
            runs[-1].draws.append(draw)
        else:
            runs.append(Siblings(len(runs), place, [draw]))
    return runs


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, inside a notebook's running loop too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    thread = SamplingThread()
    try:
        return thread.run(work)
    finally:
        thread.close()  # also when the wait is interrupted: what it waited for must not go on
