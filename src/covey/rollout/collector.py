"""Runs a batch of rollouts to their end: draws in, finished episodes out.

Every rollout is a coroutine around `await engine.generate(...)`; all of them are in flight at once and the engine
batches what it is given. Siblings are asked for together, so that their prompt is computed once.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from covey.core.rollout import Completion, Rollout
from covey.rollout.background import SamplingThread
from covey.rollout.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.rollout.prompts import PromptCodec
from covey.rollout.speculation import Speculation

T = TypeVar("T")
OnGroup = Callable[[int, list[dict[str, Any]], list[Rollout]], None]
"""(place of the group among those sampled, the dataset row of each of its rollouts, its rollouts)."""


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


def sample_seed(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of the key and on nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Collector:
    """Turns draws into rollouts with one engine.

    Args:
        engine: what samples.
        codec: encodes prompts and decodes completions.
        seed: with the generation's number, the prompt and the sample index, it decides every sample; with exact
            reuse, without the generation's number.
    """

    def __init__(self, engine: RolloutEngine, codec: PromptCodec, seed: int):
        self.engine = engine
        self.codec = codec
        self.seed = seed
        self.run: Callable[[Coroutine[Any, Any, list[Rollout]]], list[Rollout]] = run_async
        self._sampling = 0
        self._waking = ExitStack()

    def collect(
        self,
        draws: Sequence[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Rollout]:
        """Sample every draw; the result is in the draws' order.

        Args:
            draws: siblings (equal `prompt`) next to each other.
            params: how to sample.
            key: names this generation (mode and step): another key gives other samples, unless `reuse` is exact.
            reuse: earlier completions to begin with; these take their place.
            on_group: called with each group of siblings once it is sampled, on the thread that samples.
        """
        rollouts = self.run(self.sample(draws, params, key, reuse, on_group=on_group))
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
        on_group: OnGroup | None = None,
    ) -> list[Rollout]:
        """The same as a coroutine, which only reads `reuse`.

        Args:
            draws, params, key, reuse, on_group: as for `collect`.
            submitted: called when every request has been handed to the engine.
        """
        with self._awake():  # here, since gradient mode and autocast belong to the thread that runs this
            groups = [
                asyncio.ensure_future(self._group(number, siblings, params, key, reuse, on_group))
                for number, siblings in enumerate(_siblings(draws))
            ]
            try:
                await asyncio.sleep(0)  # each group goes as far as it can, which is into the engine
                submitted()
                answered = await asyncio.gather(*groups)
            finally:
                for group in groups:
                    group.cancel()  # siblings of one that failed
        return [rollout for rollouts in answered for rollout in rollouts]

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
        number: int,
        siblings: list[Draw],
        params: SamplingParams,
        key: tuple[int | str, ...],
        reuse: Speculation | None,
        on_group: OnGroup | None,
    ) -> list[Rollout]:
        row, prompt = siblings[0].row, siblings[0].prompt
        prompt_ids = self.codec.encode(row["prompt"], row.get("chat_template_kwargs"))
        key = key if reuse is None else reuse.seed_key(key, prompt_ids)
        seeds = [sample_seed(self.seed, *key, prompt, draw.sample) for draw in siblings]
        request = SampleRequest(prompt_ids, len(siblings), params, seeds)
        if reuse is not None:
            request = reuse.with_drafts(request, prompt, [draw.sample for draw in siblings])
        completions = await self.engine.generate(request)
        rollouts = [self._rollout(row, prompt_ids, completion, number) for completion in completions]
        if on_group is not None:
            on_group(number, [draw.row for draw in siblings], rollouts)
        return rollouts

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


def _siblings(draws: Sequence[Draw]) -> list[list[Draw]]:
    """Runs of draws of the same prompt; a prompt drawn again (sample 0 once more) starts a new run."""
    runs: list[list[Draw]] = []
    for draw in draws:
        if runs and runs[-1][-1].prompt == draw.prompt and runs[-1][-1].sample < draw.sample:
            runs[-1].append(draw)
        else:
            runs.append([draw])
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
