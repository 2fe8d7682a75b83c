"""Puts requests together that ask for continuations of the same tokens at the same moment.

Siblings are separate coroutines, and yet their common prompt should be computed once: an engine does that for the `n`
completions of one request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.core.media import Media
from covey.core.rollout import Completion


@dataclass
class _Batch:
    """Requests for the same tokens and settings, and who waits for each."""

    params: SamplingParams
    requests: list[SampleRequest] = field(default_factory=list)
    answers: list["asyncio.Future[list[Completion]]"] = field(default_factory=list)
    sent: list[Callable[[], None]] = field(default_factory=list)

    def shows(self, media: tuple[Media, ...]) -> bool:
        """Whether its requests show these very images."""
        shown = self.requests[0].media
        return len(shown) == len(media) and all(a is b for a, b in zip(shown, media, strict=True))


class RequestCoalescer:
    """An engine's `generate` for the rollouts of one group.

    What is asked for in one turn of the event loop for the same tokens becomes one request. Seeds stay with their
    completions, so merging changes no result.

    Args:
        engine: what samples.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._waiting: dict[tuple[int, ...], list[_Batch]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: SampleRequest, sent: Callable[[], None] | None = None) -> list[Completion]:
        """As the engine's. Raises what the engine raises, to everybody whose request was merged.

        Args:
            request: what is asked for.
            sent: called once the engine has been given it.
        """
        loop = asyncio.get_running_loop()
        key = tuple(request.prompt_ids)
        batches = self._waiting.setdefault(key, [])
        alike = (batch for batch in batches if batch.params == request.params and batch.shows(request.media))
        batch = next(alike, None) if request.drafts is None else None
        if batch is None:
            batch = _Batch(request.params)
            batches.append(batch)
            loop.call_soon(self._send, key, batch)
        answer: asyncio.Future[list[Completion]] = loop.create_future()
        batch.requests.append(request)
        batch.answers.append(answer)
        if sent is not None:
            batch.sent.append(sent)
        return await answer

    def _send(self, key: tuple[int, ...], batch: _Batch) -> None:
        batches = self._waiting[key]
        batches.remove(batch)
        if not batches:
            del self._waiting[key]
        task = asyncio.get_running_loop().create_task(self._answer(batch))
        self._tasks.add(task)  # the loop itself keeps no strong reference
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: _Batch) -> None:
        asked = [(one, answer) for one, answer in zip(batch.requests, batch.answers, strict=True) if not answer.done()]
        if not asked:
            return  # all who asked have been given up
        seeds = [seed for request, _ in asked for seed in request.seeds]
        for sent in batch.sent:
            asyncio.get_running_loop().call_soon(sent)  # when the engine has gone as far as it can at once
        try:
            completions = await self._engine.generate(replace(asked[0][0], n=len(seeds), seeds=seeds))
        except BaseException as error:
            for _, answer in asked:
                if not answer.done():
                    answer.cancel() if isinstance(error, asyncio.CancelledError) else answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        given = iter(completions)
        for request, answer in asked:
            part = [next(given) for _ in request.seeds]
            if not answer.done():
                answer.set_result(part)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
