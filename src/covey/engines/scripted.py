"""An engine that answers from a script, after as long as the script says: for tests, and for measuring schedules.

Nothing about it is random, and nothing depends on weights: the same requests get the same answers in every run, so
whatever differs between two runs is the schedule's doing. It takes weights as a server does (every tensor is looked at,
and the version counted), also while it samples.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.records import Completion, FinishReason
from covey.core.weights import WeightUpdate

Script = Callable[[Sequence[int], int], list[int]]
"""(prompt ids, seed of the completion) -> the completion's tokens."""


@dataclass(slots=True)
class Served:
    """A request and its fate.

    Attributes:
        request: what was asked.
        version: of the weights it was answered with.
        began, ended: by `time.monotonic`; `ended` is None while it is under way.
    """

    request: SampleRequest
    version: int
    began: float
    ended: float | None = None


class ScriptedEngine:
    """Answers requests from a script.

    A request is answered with the weights that were there when it came, whatever arrives meanwhile.

    Args:
        script: what a completion says. Cut at the request's `max_tokens`, it ends there; else it has stopped by itself.
        seconds: how long a request takes: a number, or a function of its place among all requests (0, 1, ...).
        lanes: requests that are worked on at a time, the others wait in order, as on a device that is fully used by so
            many; None: all of them.
        logprobs: (prompt ids, completion ids) -> log-probs to report; None: reports none.

    Attributes:
        served: every request so far, in the order of arrival.
        version: of the weights; None before any came.

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
        self.served: list[Served] = []
        self.version: int | None = None
        self._seconds = seconds
        self._lanes = lanes
        self._logprobs = logprobs
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Answer, after the programmed time."""
        number = len(self.served)
        served = Served(request, self.version or 0, time.monotonic())
        self.served.append(served)
        seconds = self._seconds(number) if callable(self._seconds) else self._seconds
        async with self._lane():
            await asyncio.sleep(seconds)
        served.ended = time.monotonic()
        return [self._completion(request, seed, served.version) for seed in request.seeds]

    def load_weights(self, update: WeightUpdate) -> None:
        """Look at every tensor and take note of the version."""
        for _ in update.checked():
            pass
        self.version = update.version

    def awake(self) -> AbstractContextManager[None]:
        """It never sleeps."""
        return nullcontext()

    def _lane(self) -> asyncio.Semaphore:
        """Room to work in. A semaphore belongs to the event loop that waits for it."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = asyncio.Semaphore(self._lanes or 2**31)
        return self._gates[loop]

    def _completion(self, request: SampleRequest, seed: int, version: int) -> Completion:
        ids = self.script(request.prompt_ids, seed)
        finish = FinishReason.LENGTH if len(ids) > request.params.max_tokens else FinishReason.STOP
        ids = ids[: request.params.max_tokens]
        logprobs = None if self._logprobs is None else self._logprobs(request.prompt_ids, ids)
        return Completion(ids, logprobs, finish, versions=[version] * len(ids))
