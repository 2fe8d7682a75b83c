"""Collector: turns prompt samples into finished rollouts with one engine, which batches concurrent requests.

A rollout that fails is a result (`FinishReason.ERROR`); an exception of the engine ends all of them.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.core.records import PromptSample, Rollout, SampleGroup, absent_rollout
from covey.rollout.images import embed_images
from covey.rollout.prompts import PromptCodec, is_conversational, row_images, sample_seed
from covey.rollout.request_coalescing import RequestCoalescer
from covey.rollout.runner import NO_CALLBACKS, GroupRunner, RolloutCallbacks, RolloutSpec, failed_rollout, within
from covey.rollout.seats import PastOpponents
from covey.rollout.speculation import Speculation
from covey.rollout.user_batch_function import BatchFunction, BatchSampler
from covey.runtime.calling_thread import CallingThread
from covey.runtime.interrupts import run_alone
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import warn

T = TypeVar("T")
RunsSampling = Callable[[Coroutine[Any, Any, list[Rollout]]], list[Rollout]]


class Collector:
    """Runs batches of prompt samples to finished rollouts, each one completion or, with a `spec`, a coroutine."""

    def __init__(
        self,
        engine: RolloutEngine,
        codec: PromptCodec,
        seed: int,
        spec: RolloutSpec | None = None,
        opponents: Sequence[PastOpponents] = (),
    ):
        self.engine, self.codec, self.seed, self.spec = engine, codec, seed, spec
        self.opponents = opponents  # earlier policies, which are to be kept as training proceeds
        self.run: RunsSampling = run_async
        if spec is not None and spec.calls_functions:
            self.run = CallingThread("covey-sampling").run
        self._batches = 0
        self._engine_awake = ExitStack()

    def run_by(self, run: RunsSampling) -> RunsSampling:
        """Replace the function by which `collect` runs coroutines; returns the previous one."""
        before, self.run = self.run, run
        return before

    def collect(
        self,
        samples: Sequence[PromptSample],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        callbacks: RolloutCallbacks = NO_CALLBACKS,
    ) -> list[Rollout]:
        """One rollout per sample, in order. Seeds depend on `key` (mode, step), unless `reuse` is exact."""
        rollouts = self.run(self.sample(samples, params, key, reuse, callbacks=callbacks))
        if reuse is not None:
            reuse.remember([sample.prompt for sample in samples], [sample.sample for sample in samples], rollouts)
        return rollouts

    async def sample(
        self,
        samples: Sequence[PromptSample],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        submitted: Callable[[], None] = lambda: None,
        callbacks: RolloutCallbacks = NO_CALLBACKS,
    ) -> list[Rollout]:
        """`collect` as a coroutine, which only reads `reuse`; calls `submitted` once the engine has every request."""
        with self._awake():  # here, since gradient mode and autocast belong to the thread that runs this
            all_groups, spec = sample_groups(samples), self.spec
            groups = [group for one in all_groups if (group := without_absent(one)).samples]
            if spec is not None and isinstance(spec.play, BatchFunction):
                submitted()
                played = await self._play_batch(spec.play, groups, params, key, callbacks)
                return _number_groups(self._filled_up(all_groups, groups, played), params)
            runner = None
            if spec is not None:
                runner = GroupRunner(self.engine, self.codec, spec, params, (self.seed, *key), callbacks)

            async def sample_group(group: SampleGroup) -> list[Rollout]:
                if runner is not None:
                    rollouts = await runner.play_group(group)
                else:
                    rollouts = await self._complete(group, params, key, reuse)
                    callbacks.on_rollouts(group.start, group.rows, rollouts)
                callbacks.on_group(group.start, group.rows, rollouts)
                return rollouts

            tasks = [asyncio.ensure_future(sample_group(group)) for group in groups]
            try:
                await asyncio.sleep(0)  # each group runs until it has submitted its request
                if runner is not None:
                    await runner.all_sent()  # or, with several rollouts a group, until these have
                submitted()
                return _number_groups(self._filled_up(all_groups, groups, await asyncio.gather(*tasks)), params)
            finally:
                for task in tasks:
                    task.cancel()  # the other groups of a batch that failed

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Context in which the engine is awake, from the first to the last of several batches sampled at once."""
        if not self._batches:
            self._engine_awake.enter_context(self.engine.awake())
        self._batches += 1
        raised: Any = (None, None, None)
        try:
            yield
        except BaseException:
            raised = sys.exc_info()  # passed on: an engine may have to report to other processes that it failed
            raise
        finally:
            self._batches -= 1
            if not self._batches:
                self._engine_awake.__exit__(*raised)

    async def _complete(
        self, group: SampleGroup, params: SamplingParams, key: tuple[int | str, ...], reuse: Speculation | None
    ) -> list[Rollout]:
        row, prompt = group.rows[0], group.samples[0].prompt
        try:
            encoded = self.codec.read_row(row)
        except ValueError as error:
            return self._unreadable(group, error)
        params = within(params, group.samples[0])
        key = key if reuse is None else reuse.seed_key(key, encoded.ids)
        seeds = [sample_seed(self.seed, *key, prompt, sample.sample) for sample in group.samples]
        request = SampleRequest(encoded.ids, len(seeds), params, seeds, media=encoded.media)
        shown = embed_images(row["prompt"], row_images(row))[0] if encoded.media else None
        if reuse is not None:
            request = reuse.with_drafts(request, prompt, [sample.sample for sample in group.samples])
        return [
            Rollout(
                prompt_ids=encoded.ids,
                prompt=shown,
                media=encoded.media,
                completion_ids=completion.token_ids,
                sampled=[True] * len(completion.token_ids),
                completion=self.codec.decode(row["prompt"], completion.token_ids),
                finish=completion.finish,
                reused=completion.reused,
                logprobs=completion.logprobs,
                entropies=completion.entropies,
                versions=completion.versions,
                sampling_mask=completion.sampling_mask,
                routes=completion.routes,
            )
            for completion in await self.engine.generate(request)
        ]

    async def _play_batch(
        self,
        function: BatchFunction,
        groups: Sequence[SampleGroup],
        params: SamplingParams,
        key: tuple[int | str, ...],
        callbacks: RolloutCallbacks,
    ) -> list[list[Rollout]]:
        first = (groups[0].samples[0].prompt, groups[0].samples[0].sample) if groups else ()  # differs by process
        prompts, images = [], []
        limits: dict[tuple[int, ...], int] = {}  # of all prompts, as one may begin with another
        limited = any(group.samples[0].max_tokens is not None for group in groups)
        unreadable: dict[int, list[Rollout]] = {}  # by the group's start
        for group in groups:
            row = group.rows[0]
            prompt, shown = row["prompt"], list[Any]()
            try:
                if self.codec.vision is not None:
                    self.codec.read_row(row)
                    prompt, shown = embed_images(prompt, row_images(row))
                if limited:
                    ids, own = tuple(self.codec.read(prompt).ids), within(params, group.samples[0]).max_tokens
                    limits[ids] = min(own, limits.get(ids, own))
            except ValueError as error:
                unreadable[group.start] = self._unreadable(group, error)
            else:
                prompts += [prompt] * len(group.samples)
                images += [shown] * len(group.samples)
        if prompts:
            sampler = BatchSampler(RequestCoalescer(self.engine), self.codec, params, (self.seed, *key, *first), limits)
            returned = iter(await function(prompts, images, sampler))
        rollouts = []
        for group in groups:
            rollouts.append(unreadable.get(group.start) or [next(returned) for _ in group.samples])
            callbacks.on_rollouts(group.start, group.rows, rollouts[-1])
            callbacks.on_group(group.start, group.rows, rollouts[-1])
        return rollouts

    def _filled_up(
        self, all_groups: Sequence[SampleGroup], groups: Sequence[SampleGroup], played: Sequence[list[Rollout]]
    ) -> list[list[Rollout]]:
        """The rollouts of all groups, with absent ones for samples that nothing is sampled for."""
        by_start = {group.start: rollouts for group, rollouts in zip(groups, played, strict=True)}
        filled = []
        for group in all_groups:
            rollouts = by_start.get(group.start, [])
            ids = rollouts[0].prompt_ids if rollouts else [self.codec.tokenizer.eos_token_id or 0]
            empty: Any = [] if is_conversational(group.rows[0].get("prompt")) else ""
            missing = len(group.samples) - len(rollouts)
            filled.append([*rollouts, *(absent_rollout(ids, empty) for _ in range(missing))])
        return filled

    def _unreadable(self, group: SampleGroup, error: ValueError) -> list[Rollout]:
        text = f"row {group.samples[0].prompt} of the dataset: {error}"
        return [failed_rollout(self.codec, row, text) for row in group.rows]


def sample_groups(samples: Sequence[PromptSample]) -> list[SampleGroup]:
    """Groups of consecutive samples of one prompt; a repeated prompt (sample 0 again) starts a new group."""
    groups: list[SampleGroup] = []
    for index, sample in enumerate(samples):
        last = samples[index - 1] if index else None
        if last is None or last.prompt != sample.prompt or last.sample >= sample.sample:
            groups.append(SampleGroup(index, [], []))
        groups[-1].samples.append(sample)
        groups[-1].rows.append(sample.row)
    return groups


def without_absent(group: SampleGroup) -> SampleGroup:
    """The samples of a group that are to be sampled, which come first."""
    count = sum(not sample.absent for sample in group.samples)
    return SampleGroup(group.start, group.samples[:count], group.rows[:count])


def group_numbers(samples: Sequence[PromptSample]) -> list[int]:
    """[n] index of each sample's group."""
    return [number for number, group in enumerate(sample_groups(samples)) for _ in group.samples]


def _number_groups(groups: Sequence[Sequence[Rollout]], params: SamplingParams) -> list[Rollout]:
    """All rollouts, with one `group` per group and prompt: an episode may begin with a prompt of its own."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    numbered: list[Rollout] = []
    for index, group in enumerate(groups):
        for rollout in group:
            if params.keep_mask and rollout.sampling_mask is None and any(rollout.sampled):
                raise ValueError(
                    "keep_sampling_mask=True, but a rollout has no `sampling_mask`, the tokens that each one was drawn"
                    " from. Return the engine's `Completion.sampling_mask`, as an episode's `done()` does, or leave"
                    " keep_sampling_mask False. A rollout_func(prompts, trainer) cannot return masks."
                )
            if rollout.sampling_mask and not params.keep_mask:
                warn(
                    "rollouts have a `sampling_mask`, which is not used because keep_sampling_mask is False. Set it to"
                    " True to train the distribution that was sampled from. (Evaluation suites need no masks.)",
                )
            mask = rollout.sampling_mask if params.keep_mask else None
            if mask:
                _check_masks(rollout)
            if params.keep_routes and rollout.routes is None and any(rollout.sampled):
                raise ValueError(
                    "routing_replay='R3' needs the experts of all tokens, but a rollout has no `routes`. Return the"
                    " engine's `Completion.routes`, as an episode's `done()` does, or leave routing_replay unset. A"
                    " rollout_func(prompts, trainer) cannot return routes."
                )
            number = numbers.setdefault((index, tuple(rollout.prompt_ids)), len(numbers))
            routes = rollout.routes if params.keep_routes else None
            numbered.append(replace(rollout, group=number, sampling_mask=mask, routes=routes))
    return numbered


def _check_masks(rollout: Rollout) -> None:
    triples = zip(rollout.completion_ids, rollout.sampled, rollout.sampling_mask or (), strict=False)
    for token, sampled, mask in triples:
        if sampled and len(mask) and token not in mask:
            raise ValueError(
                f"a rollout's `sampling_mask` lists {len(mask)} tokens for the sampled token {token}, not among them:"
                " its probability would be 0. Give the list of each token, or an empty list for the whole"
                " vocabulary."
            )


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, even inside the running event loop of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_alone(work)
    thread = LoopThread("covey-sampling", no_grad=True)
    try:
        return thread.run(work)
    finally:
        thread.close(seconds=5.0)  # also when the wait is interrupted: what it waited for must not continue
