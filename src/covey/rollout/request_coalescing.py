"""Request coalescing: concurrent requests for the same tokens become one, so that their prompt is computed once."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from covey.core.engine import RolloutEngine, SampleRequest
from covey.core.records import Completion

Entry = tuple[SampleRequest, "asyncio.Future[list[Completion]]", Callable[[], None] | None]  # with its callback
Batch = list[Entry]  # requests for the same tokens and parameters


def _takes(batch: Batch, request: SampleRequest) -> bool:
    first = batch[0][0]
    return first.params == request.params and list(map(id, first.media)) == list(map(id, request.media))


class RequestCoalescer:
    """An engine's `generate` for one group. It merges requests made in one iteration of the event loop.

    Merging does not change results, because each completion has its own seed.
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._waiting: dict[tuple[int, ...], list[Batch]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: SampleRequest, sent: Callable[[], None] | None = None) -> list[Completion]:
        """Completions of a request; `sent` is called once the engine has it. An error reaches all merged requests."""
        loop = asyncio.get_running_loop()
        key = tuple(request.prompt_ids)
        batches = self._waiting.setdefault(key, [])
        batch = next((one for one in batches if _takes(one, request)), None) if request.drafts is None else None
        if batch is None:
            batch = []
            batches.append(batch)
            task = loop.create_task(self._generate(key, batch))
            self._tasks.add(task)  # the loop itself holds no strong reference
            task.add_done_callback(partial(self._end, batch))
        future: asyncio.Future[list[Completion]] = loop.create_future()
        batch.append((request, future, sent))
        return await future

    async def _generate(self, key: tuple[int, ...], batch: Batch) -> None:
        self._waiting[key].remove(batch)
        if not self._waiting[key]:
            del self._waiting[key]
        pending = [(request, future) for request, future, _ in batch if not future.done()]
        if not pending:
            return  # all requests were cancelled
        seeds = [seed for request, _ in pending for seed in request.seeds]
        for _, _, sent in batch:
            if sent is not None:
                asyncio.get_running_loop().call_soon(sent)  # once the engine has begun with the request
        completions = iter(await self._engine.generate(replace(pending[0][0], n=len(seeds), seeds=seeds)))
        for request, future in pending:
            own = [next(completions) for _ in request.seeds]
            if not future.done():
                future.set_result(own)

    def _end(self, batch: Batch, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        for _, future, _ in batch:
            if task.cancelled():  # perhaps before it ran a line
                future.cancel()
            elif (error := task.exception()) is not None and not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Cancel all requests, sent or not."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
