"""Runs a batch of rollouts to their end: draws in, finished episodes out.

Everything is in flight at once and the engine batches what it is given. The plain rollout is one completion; siblings
are then one request, so that their prompt is computed once. With an agent (`covey.rollout.tool_agent`) every rollout is
a coroutine of its own, which goes on as fast as its tools and turns allow; one that fails is an outcome like another
(`FinishReason.ERROR`), while what the engine raises ends the batch.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.core.rollout import Completion, Rollout
from covey.rollout.images import images_of, showing
from covey.rollout.prompts import PromptCodec
from covey.rollout.request_coalescing import RequestCoalescer
from covey.rollout.runner import GroupRunner, RolloutCallbacks, failed_rollout
from covey.rollout.runner import RolloutSpec as RolloutSpec
from covey.rollout.seeds import sample_seed
from covey.rollout.speculation import Speculation
from covey.rollout.tasks import PromptSample as PromptSample
from covey.rollout.tasks import SampleGroup, sample_groups
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.vision import Encoded
from covey.runtime.sampling_thread import SamplingThread

T = TypeVar("T")


class Collector:
    """Turns draws into rollouts with one engine.

    Args:
        engine: what samples.
        codec: encodes prompts and decodes completions.
        seed: with the generation's number, the prompt and the sample index, it decides every sample; with exact
            reuse, without the generation's number.
        agency: what plays the rollouts; None: each is one completion.
    """

    def __init__(self, engine: RolloutEngine, codec: PromptCodec, seed: int, agency: RolloutSpec | None = None):
        self.engine = engine
        self.codec = codec
        self.seed = seed
        self.agency = agency
        self.run: Callable[[Coroutine[Any, Any, list[Rollout]]], list[Rollout]] = run_async
        self._sampling = 0
        self._waking = ExitStack()

    def collect(
        self,
        draws: Sequence[PromptSample],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        ended: RolloutCallbacks | None = None,
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
        draws: Sequence[PromptSample],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        submitted: Callable[[], None] = lambda: None,
        ended: RolloutCallbacks | None = None,
    ) -> list[Rollout]:
        """The same as a coroutine, which only reads `reuse`.

        Args:
            draws, params, key, reuse, ended: as for `collect`.
            submitted: called when every request has been handed to the engine: the first ones of rollouts that make
                several, if they do so soon.
        """
        with self._awake():  # here, since gradient mode and autocast belong to the thread that runs this
            if self.agency is not None and isinstance(self.agency.play, BatchFunction):
                submitted()
                return await self._batch(self.agency.play, draws, params, key, ended)
            playing = None
            if self.agency is not None:
                playing = GroupRunner(self.engine, self.codec, self.agency, params, (self.seed, *key), ended)
            groups = [
                asyncio.ensure_future(self._group(one, params, key, reuse, ended, playing))
                for one in sample_groups(draws)
            ]
            try:
                await asyncio.sleep(0)  # each group goes as far as it can, which is into the engine
                if playing is not None:
                    await playing.first.all_sent()  # or to its rollouts, which do
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
        group: SampleGroup,
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None,
        ended: RolloutCallbacks | None,
        playing: GroupRunner | None,
    ) -> list[Rollout]:
        if playing is not None:
            rollouts = await playing.group(group)
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
        group: SampleGroup,
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None,
    ) -> list[Rollout]:
        sample_groups, row, prompt = group.draws, group.draws[0].row, group.draws[0].prompt
        try:
            encoded = self.codec.read_row(row)
        except ValueError as error:
            return self._unreadable(group, error)
        prompt_ids = encoded.ids
        key = key if reuse is None else reuse.seed_key(key, prompt_ids)
        seeds = [sample_seed(self.seed, *key, prompt, draw.sample) for draw in sample_groups]
        request = SampleRequest(prompt_ids, len(sample_groups), params, seeds, media=encoded.media)
        if reuse is not None:
            request = reuse.with_drafts(request, prompt, [draw.sample for draw in sample_groups])
        completions = await self.engine.generate(request)
        return [self._rollout(row, encoded, completion, group.number) for completion in completions]

    def _rollout(self, row: dict[str, Any], prompt: Encoded, completion: Completion, group: int) -> Rollout:
        return Rollout(
            prompt_ids=prompt.ids,
            media=prompt.media,
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

    async def _batch(
        self,
        function: BatchFunction,
        draws: Sequence[PromptSample],
        params: SamplingParams,
        key: tuple[int | str, ...],
        ended: RolloutCallbacks | None,
    ) -> list[Rollout]:
        """All rollouts at once, by a function of the user's."""
        first = [number for draw in draws[:1] for number in (draw.prompt, draw.sample)]  # other processes have others
        groups, played, shown = sample_groups(draws), [], []
        rollouts: dict[int, list[Rollout]] = {}
        for group in groups:
            try:
                prompt, images = self._showing(group.draws[0].row)
            except ValueError as error:
                rollouts[group.number] = self._unreadable(group, error)
            else:
                played += [prompt] * len(group.draws)
                shown += [images] * len(group.draws)
        if played:
            with function.sampling(RequestCoalescer(self.engine), self.codec, params, (self.seed, *key, *first)):
                returned = iter(await function(played, shown))
        for group in groups:
            if group.number not in rollouts:
                rollouts[group.number] = [next(returned) for _ in group.draws]
            for rollout in rollouts[group.number]:
                rollout.group = group.number
            if ended is not None:
                ended.on_rollouts(group.place, group.rows, rollouts[group.number])
                ended.on_group(group.place, group.rows, rollouts[group.number])
        return _numbered([rollout for group in groups for rollout in rollouts[group.number]])

    def _showing(self, row: dict[str, Any]) -> tuple[Any, list[Any]]:
        """A row's prompt, and the images that it shows a vision-language model.

        Raises:
            ValueError: these cannot be read, or the prompt cannot be encoded with them.
        """
        if self.codec.vision is None:
            return row["prompt"], []
        self.codec.read_row(row)
        return showing(row["prompt"], images_of(row))

    def _unreadable(self, group: SampleGroup, error: ValueError) -> list[Rollout]:
        """A row that cannot be shown to the policy costs itself."""
        said = f"row {group.draws[0].prompt} of the dataset: {error}"
        return [replace(failed_rollout(self.codec, row, said), group=group.number) for row in group.rows]


def _numbered(rollouts: list[Rollout]) -> list[Rollout]:
    """Groups are numbered anew, so that only rollouts with the same prompt share one (an episode may begin its own)."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    for rollout in rollouts:
        place = rollout.group, tuple(rollout.prompt_ids)
        rollout.group = numbers.setdefault(place, len(numbers))
    return rollouts


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
