"""Engine with scripted completions and durations: nothing is random, so runs differ by their schedules alone."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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


class ScriptedEngine:
    """Samples from a script. A request keeps the weights of its arrival, whatever is loaded meanwhile.

    Args:
        script: gives the tokens of a completion; those longer than the request's `max_tokens` are truncated.
        seconds: duration of a request: a number, or a function of its index among all requests (0, 1, ...).
        lanes: most requests processed at once, while others wait in order, as on a device that they fully use; None:
            no limit.
        logprobs: (prompt ids, completion ids) -> log-probs to report; None: none.

    Attributes:
        served: every request so far, in the order of arrival.
        version: of the weights; None before the first update.

    Example:
        >>> from covey.core.engine import SamplingParams
        >>> engine = ScriptedEngine(lambda prompt, seed: [prompt[-1], seed])
        >>> request = SampleRequest([5, 6], n=2, params=SamplingParams(max_tokens=8), seeds=[1, 2])
        >>> [completion.token_ids for completion in asyncio.run(engine.generate(request))]
        [[6, 1], [6, 2]]
    """

    traits = EngineTraits(updates_in_flight=True)

    def __init__(
        self,
        script: Script,
        *,
        seconds: float | Callable[[int], float] = 0.0,
        lanes: int | None = None,
        logprobs: Callable[[Sequence[int], list[int]], list[float]] | None = None,
    ):
        self.script = script
        self.served: list[ServedRequest] = []
        self.version: int | None = None
        self._seconds, self._lanes, self._logprobs = seconds, lanes, logprobs
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Return the scripted completions after the scripted time."""
        number = len(self.served)
        served = ServedRequest(request, self.version or 0, time.monotonic())
        self.served.append(served)
        seconds = self._seconds(number) if callable(self._seconds) else self._seconds
        lanes = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._lanes or 2**31))
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
        logprobs = None if self._logprobs is None else self._logprobs(request.prompt_ids, ids)
        return Completion(ids, logprobs, finish, versions=[version] * len(ids))
