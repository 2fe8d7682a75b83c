"""One reward function on one batch, under a deadline and with failures isolated to their samples.

The whole batch is tried first. If that raises, every sample is tried alone, so that one bad sample costs only itself.
The deadline covers both. A function that returns what cannot be told apart by samples (`RewardError`) has failed on all
of them; one that asks for what nobody has (`MissingArgument`) fails on any batch, and that passes through.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from covey.core.credit import StepRewards
from covey.rewards.batch import Log, RewardBatch
from covey.rewards.errors import MissingArgument, RewardError
from covey.rewards.functions import FunctionReward, Unusable, Values
from covey.rewards.models import ModelReward
from covey.rewards.steps import total
from covey.runtime.deadlines import CallTimeout, Interrupt, await_with_deadline, call_with_deadline
from covey.runtime.user_code import format_error

LOOP_GRACE = 1.0
"""Seconds that an async function may be late with its result; then its event loop counts as blocked."""

WithDeadline = Callable[[Callable[[], Any], float], Any]
"""(function without arguments, seconds) -> what it returns; `CallTimeout` once they have passed."""


@dataclass(frozen=True)
class Attempt:
    """One call: its values and log, or what it ended with.

    Attributes:
        values, log: None if it failed.
        error: what it raised, or `CallTimeout`.
        text: the error in words.
    """

    values: Values | None = None
    log: Log | None = None
    error: BaseException | None = None
    text: str = ""

    @property
    def late(self) -> bool:
        """Whether it was not done by the deadline."""
        return isinstance(self.error, CallTimeout)


@dataclass(frozen=True)
class Outcome:
    """What a function made of a batch.

    Attributes:
        values: one per sample; NaN where it abstained, failed or was late; the sum where it rewarded steps.
        steps: the rewards of a sample's steps, as the function returned them; None where it returned no such.
        failures: samples on which it raised, or returned NaN or what is no reward.
        timeouts: samples that it had not scored at the deadline.
        culprit: index of the first failure.
        error: what the culprit raised, or the call on the whole batch if every sample failed.
        text: that error in words.
        log: what the successful calls logged.
        seconds: wall time.
    """

    values: list[float]
    steps: list[StepRewards | None]
    failures: int
    timeouts: int
    culprit: int
    error: BaseException | None
    log: Log
    seconds: float
    text: str = ""

    @classmethod
    def of(cls, size: int, whole: Attempt, parts: list[Attempt], seconds: float) -> "Outcome":
        """From the attempt on the whole batch and, if that raised, the attempts on its samples."""
        if whole.late:
            return cls.timed_out(size, seconds)
        if whole.values is not None and whole.log is not None:
            returned, log = whole.values, whole.log
        elif not parts:
            returned, log = [math.nan] * size, Log(size)
        else:
            returned = [part.values[0] if part.values is not None else math.nan for part in parts]
            log = Log.joined([part.log for part in parts])
        steps = [value if isinstance(value, list) else None for value in returned]
        values = [total(value) if isinstance(value, list) else value for value in returned]
        late = {index for index, part in enumerate(parts) if part.late}
        failed = [i for i, value in enumerate(values) if value is not None and math.isnan(value) and i not in late]
        culprit = parts[failed[0]] if parts and 0 < len(failed) < size else whole
        error, text = culprit.error, culprit.text
        if error is None and failed and isinstance(unusable := values[failed[0]], Unusable):
            error, text = RewardError(unusable.why), unusable.why
        return cls(
            values=[math.nan if value is None else value for value in values],
            steps=steps,
            failures=len(failed),
            timeouts=len(late),
            culprit=failed[0] if failed else 0,
            error=error,
            log=log,
            seconds=seconds,
            text=text,
        )

    @classmethod
    def timed_out(cls, size: int, seconds: float) -> "Outcome":
        """Nothing was scored in time."""
        return cls([math.nan] * size, [None] * size, 0, size, 0, CallTimeout(), Log(size), seconds)

    @classmethod
    def joined(cls, parts: "list[Outcome]") -> "Outcome":
        """Of a batch that was scored in parts, which follow one another; their seconds add up."""
        failed = next((number for number, part in enumerate(parts) if part.failures), None)
        before = sum(len(part.values) for part in parts[:failed]) if failed is not None else 0
        late = next((part.error for part in parts if part.timeouts), None)
        return cls(
            values=[value for part in parts for value in part.values],
            steps=[steps for part in parts for steps in part.steps],
            failures=sum(part.failures for part in parts),
            timeouts=sum(part.timeouts for part in parts),
            culprit=0 if failed is None else before + parts[failed].culprit,
            error=late if failed is None else parts[failed].error,
            text="" if failed is None else parts[failed].text,
            log=Log.joined([part.log for part in parts]),
            seconds=sum(part.seconds for part in parts),
        )

    def without(self, unusable: dict[int, str]) -> "Outcome":
        """The same, but for samples whose values turn out to be no rewards: they have failed, for these reasons."""
        if not unusable:
            return self
        first = min(unusable)
        return replace(
            self,
            values=[math.nan if sample in unusable else value for sample, value in enumerate(self.values)],
            steps=[None if sample in unusable else steps for sample, steps in enumerate(self.steps)],
            failures=self.failures + len(unusable),
            culprit=first,
            error=RewardError(unusable[first]),
            text=unusable[first],
        )

    @classmethod
    def empty(cls) -> "Outcome":
        """Of no samples."""
        return cls([], [], 0, 0, 0, None, Log(0), 0.0)

    def describe_error(self, timeout: float) -> str:
        """Why samples failed."""
        if self.error is None:
            return "it returned NaN; None is how to abstain"
        if isinstance(self.error, CallTimeout):
            return f"no answer within {timeout:g} s"
        return self.text


def score(
    function: FunctionReward | ModelReward,
    batch: RewardBatch,
    trainer_state: Any,
    timeout: float,
    call: WithDeadline = call_with_deadline,
) -> Outcome:
    """Score with a sync function or a model. A function scores one batch at a time, whichever threads ask.

    Args:
        function: what scores.
        batch: what is scored.
        trainer_state: what the function sees of the trainer.
        timeout: seconds that it may take.
        call: runs it under a deadline.
    """
    with function.turn if isinstance(function, FunctionReward) else nullcontext():
        return _score(function, batch, trainer_state, timeout, call)


def _score(
    function: FunctionReward | ModelReward, batch: RewardBatch, trainer_state: Any, timeout: float, call: WithDeadline
) -> Outcome:
    start = time.monotonic()

    def attempt(some: RewardBatch) -> Attempt:
        log = Log(len(some))

        def tried() -> Attempt:
            try:
                return Attempt(function(some, trainer_state, log), log)
            except Interrupt:
                raise
            except BaseException as error:  # SystemExit too, as code that a completion holds may raise it
                if _is_interrupt(error):
                    raise
                return Attempt(error=error, text=_in_words(error))  # here: it may be slow, or broken

        try:
            return call(tried, timeout - (time.monotonic() - start))
        except CallTimeout as error:
            return Attempt(error=error)

    whole = attempt(batch)
    parts = [attempt(sample) for sample in samples_to_retry(whole, batch)]
    return Outcome.of(len(batch), whole, parts, time.monotonic() - start)


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, which only the main thread hears."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, RewardError) else format_error(error)


async def score_async(function: FunctionReward, batch: RewardBatch, trainer_state: Any, timeout: float) -> Outcome:
    """Score with an async function; the samples of a batch that raised are tried concurrently."""
    start = time.monotonic()

    async def tried(some: RewardBatch) -> Attempt:
        log = Log(len(some))
        try:
            return Attempt(await function.call_async(some, trainer_state, log), log)
        except BaseException as error:  # SystemExit would end the loop; cancellation comes when nobody waits any more
            return Attempt(error=error, text=_in_words(error))

    async def attempt(some: RewardBatch) -> Attempt:
        try:
            return await await_with_deadline(tried(some), timeout - (time.monotonic() - start))
        except CallTimeout as error:
            return Attempt(error=error)

    whole = await attempt(batch)
    parts = await asyncio.gather(*(attempt(sample) for sample in samples_to_retry(whole, batch)))
    return Outcome.of(len(batch), whole, parts, time.monotonic() - start)


def samples_to_retry(whole: Attempt, batch: RewardBatch) -> list[RewardBatch]:
    """Every sample alone where the whole batch raised, else none.

    A function that returned another number of rewards might return one for a single sample whatever that is.

    Raises:
        MissingArgument: the function asks for what nobody has.
    """
    if isinstance(whole.error, MissingArgument):
        raise whole.error
    return (
        []
        if whole.error is None or whole.late or isinstance(whole.error, RewardError)
        else [batch.sample(index) for index in range(len(batch))]
    )
