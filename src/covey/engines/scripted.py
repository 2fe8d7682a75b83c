"""Engine with scripted completions and durations: nothing is random, so runs differ only by their schedules."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from covey.core.engine import EngineTraits, SampleRequest, WeightUpdate
from covey.core.records import Completion, FinishReason

Script = Callable[[Sequence[int], int], list[int]]  # (prompt ids, seed of the completion) -> the completion's tokens


@dataclass(slots=True)
class ServedRequest:
    """A request with its times by `time.monotonic`."""

    request: SampleRequest
    version: int  # of the weights at its arrival
    began: float
    ended: float | None = None  # None while it is in progress


@dataclass(eq=False)
class ScriptedEngine:
    """Samples from a script. A request keeps the weights version of its arrival, even if another is loaded meanwhile.

    Example:
        >>> from covey.core.engine import SamplingParams
        >>> engine = ScriptedEngine(lambda prompt, seed: [prompt[-1], seed])
        >>> request = SampleRequest([5, 6], n=2, params=SamplingParams(max_tokens=8), seeds=[1, 2])
        >>> [completion.token_ids for completion in asyncio.run(engine.generate(request))]
        [[6, 1], [6, 2]]
    """

    traits: ClassVar[EngineTraits] = EngineTraits(updates_in_flight=True)

    script: Script  # completions longer than the request's `max_tokens` are truncated
    _: KW_ONLY
    seconds: float | Callable[[int], float] = 0.0  # duration of a request, or a function of its index from 0
    lanes: int | None = None  # most requests at once; others wait in order. None: no limit
    logprobs: Callable[[Sequence[int], list[int]], list[float]] | None = None  # of prompt ids and completion ids
    served: list[ServedRequest] = field(default_factory=list, init=False)  # every request, in the order of arrival
    version: int | None = field(default=None, init=False)  # of the weights; None before the first update
    _semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Return the scripted completions after the scripted time."""
        number = len(self.served)
        served = ServedRequest(request, self.version or 0, time.monotonic())
        self.served.append(served)
        seconds = self.seconds(number) if callable(self.seconds) else self.seconds
        lanes = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.lanes or 2**31))
        async with lanes:
            await asyncio.sleep(seconds)
        served.ended = time.monotonic()
        return [self._completion(request, seed, served.version) for seed in request.seeds]

    def load_weights(self, update: WeightUpdate) -> None:
        """Check every tensor and store the version."""
        for _ in update.checked():
            pass
        self.version = update.version

    def awake(self) -> AbstractContextManager[None]:
        """Do nothing: the engine never sleeps."""
        return nullcontext()

    def _completion(self, request: SampleRequest, seed: int, version: int) -> Completion:
        ids = self.script(request.prompt_ids, seed)
        finish = FinishReason.LENGTH if len(ids) > request.params.max_tokens else FinishReason.STOP
        ids = ids[: request.params.max_tokens]
        logprobs = None if self.logprobs is None else self.logprobs(request.prompt_ids, ids)
        return Completion(ids, logprobs, finish, versions=[version] * len(ids))
