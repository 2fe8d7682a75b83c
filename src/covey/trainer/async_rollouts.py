"""Async rollouts: while one rollout batch is trained on, later ones are sampled (`max_staleness`).

A rollout batch whose training begins after optimizer step s is launched at the beginning of the first step v for which
s - v <= max_staleness, with the weights of v. What is launched when depends on no clock: the main thread decides, alike
on every process, and only the engine is waited for in the background.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from covey.config.algebra import BatchAlgebra
from covey.core.engine import SamplingParams, traits_of
from covey.core.media import Media
from covey.core.records import FinishReason, PromptSample, Rollout
from covey.core.stats import Stat, merge_all
from covey.data.dynamic_sampling import PromptSource
from covey.rewards.call import RewardStream
from covey.rollout.collector import Collector
from covey.rollout.environments.agent import OBJECTS
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import call_all, unsaveable_part

Stats = dict[str, Stat]

SUBMITTED = 30.0  # seconds that a launch waits until the engine has its requests; a later one may meet newer weights


@dataclass
class InFlightBatch:
    """A rollout batch that is being sampled, or has been."""

    number: int  # since the run began
    key: tuple[str, int]  # what its samples are seeded with
    version: int  # of the weights that it was launched with
    samples: list[PromptSample]  # of this process
    work: Future[list[Rollout]]  # the rollouts, in the samples' order
    stream: RewardStream = field(default_factory=RewardStream)  # of rollouts as they end; empty in a resumed run

    def rollouts(self) -> list[Rollout]:
        """The finished rollouts; their weight version is the launch's where the engine gives none."""
        return [
            one if one.versions is not None else replace(one, versions=[self.version] * len(one.completion_ids))
            for one in self.work.result()
        ]

    def state(self) -> dict[str, Any]:
        """The batch as plain values; a resumed run samples again what failed or cannot be saved."""
        done = self.work.done() and not self.work.cancelled() and self.work.exception() is None
        done = done and not any(OBJECTS in rollout.extras for rollout in self.work.result())
        rollouts = [_plain(rollout) for rollout in self.rollouts()] if done else None
        values = (item for one in rollouts or () for item in one.items())
        if odd := next(filter(None, (unsaveable_part(value, name) for name, value in values)), None):
            warnings.warn(
                "rollouts sampled ahead are not in the checkpoint, and a run that continues from it samples them again:"
                f" a rollout's {odd}, and checkpoints hold numbers, text, tensors, and lists and dictionaries of them.",
                stacklevel=2,
            )
            rollouts = None
        return {
            "generation": self.number,
            "key": list(self.key),
            "version": self.version,
            "slots": [[one.prompt, one.sample] for one in self.samples],
            "rollouts": rollouts,
        }


@dataclass(eq=False)
class AsyncRollouts:
    """The rollout batches between the one that is trained on and the newest that has been launched."""

    collector: Collector  # until `close`, all that it samples runs in the background thread
    params: SamplingParams
    prompts: PromptSource
    algebra: BatchAlgebra  # the run's batch sizes
    per_epoch: int | None  # rollout batches of an epoch; None for a dataset without length: one endless epoch
    max_steps: int  # optimizer steps of the run
    max_staleness: int  # optimizer steps between weights and training, 1 or more
    _: KW_ONLY
    next_key: Callable[[], tuple[str, int]]  # names the samples of one more rollout batch
    send_weights: Callable[[int], Stats]  # (version) -> metrics; collective where several processes train
    stream: Callable[[], RewardStream]  # makes that of a rollout batch's rollouts
    waiting: Callable[[], AbstractContextManager[None]]  # counts the time in which training waits for samples

    def __post_init__(self) -> None:
        self._thread = LoopThread("covey-sampling", no_grad=True)
        self._foreground = self.collector.run_by(self._thread.run)
        self._in_flight: deque[InFlightBatch] = deque()
        self._next: int | None = None
        self._late = 0  # optimizer steps behind the schedule, as when data were not skipped on resuming
        self._sent: int | None = None

    def launch(self, version: int, begins: int | None) -> Stats:
        """Begin to sample every rollout batch that may be sampled with weights of `version`; metrics. Collective."""
        stats = Stats()
        if begins is not None and not (self._in_flight and self._in_flight[0].number == begins):
            merge_all(stats, self._restart(begins, version))
        while self._next is not None and self._may_begin(self._next, version):
            merge_all(stats, self._launch_next(version))
        return stats

    def bring_weights(self, version: int) -> Stats:
        """Send the weights of `version` unless the engine has them; metrics. Collective."""
        if self._sent == version:
            return {}
        if not traits_of(self.collector.engine).updates_in_flight:
            self.settle()
        stats = self.send_weights(version)
        self._sent = version
        return stats

    def newest_samples(self, version: int) -> list[PromptSample]:
        """The samples of the rollout batch that was launched last, if that was with weights of `version`; else none."""
        newest = self._in_flight[-1] if self._in_flight else None
        return newest.samples if newest is not None and newest.version == version else []

    def take(self, number: int, version: int) -> tuple[InFlightBatch, Stats]:
        """A rollout batch, sampled, and metrics of weights that had to be sent for it. Collective."""
        known = bool(self._in_flight) and self._in_flight[0].number == number
        stats = Stats() if known else self._restart(number, version)
        inflight = self._in_flight.popleft()
        with self.waiting():
            self._thread.wait(inflight.work)
        return inflight, stats

    def settle(self) -> None:
        """Wait until nothing is in flight; failures are raised where a batch is taken."""
        with self.waiting():
            for inflight in self._in_flight:
                with suppress(Exception):
                    self._thread.wait(inflight.work)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {"next": self._next, "late": self._late, "flights": [inflight.state() for inflight in self._in_flight]}

    def load_state_dict(self, state: dict[str, Any], version: int) -> tuple[int, Stats]:
        """Continue where `state` was taken. Collective.

        Returns:
            The number of batches given up, which are not due yet in this run, and metrics of sending weights.
        """
        self._next, self._late = state["next"], state["late"]
        saved = state["flights"]
        kept = list(takewhile(lambda one: self._may_begin(one["generation"], one["version"]), saved))
        if len(kept) < len(saved):
            self._next = saved[len(kept)]["generation"]
        # On every process, whether or not sampling failed there.
        stats = self.bring_weights(version) if kept else Stats()
        for one in kept:
            samples = self.prompts(one["generation"], [(prompt, sample) for prompt, sample in one["slots"]])
            key = one["key"][0], one["key"][1]
            if one["rollouts"] is None:
                self._launch(one["generation"], key, version, samples)
                continue
            done: Future[list[Rollout]] = Future()
            done.set_result([_rollout(fields) for fields in one["rollouts"]])
            self._in_flight.append(InFlightBatch(one["generation"], key, one["version"], samples, done))
        return len(saved) - len(kept), stats

    def close(self, seconds: float = 5.0) -> None:
        """Cancel what is in flight and end the thread, within `seconds`, whatever the engine does."""
        self.collector.run_by(self._foreground)
        call_all(self._give_up, partial(self._thread.close, seconds))

    def begins(self, number: int) -> int:
        """The optimizer step after which the schedule begins to train on a rollout batch."""
        micro_batches, accumulation = self.algebra.micro_batches, self.algebra.gradient_accumulation_steps
        epoch, place = (0, number) if self.per_epoch is None else divmod(number, self.per_epoch)
        steps_per_epoch = -(-(self.per_epoch or 0) * micro_batches // accumulation)  # the last may be a short one
        return epoch * steps_per_epoch + place * micro_batches // accumulation

    def _may_begin(self, number: int, version: int) -> bool:
        begins = self.begins(number) + self._late
        return begins < self.max_steps and begins - version <= self.max_staleness

    def _launch_next(self, version: int) -> Stats:
        assert self._next is not None, "the dataloader has said where it is"
        stats = self.bring_weights(version)
        self._launch(self._next, self.next_key(), version, self.prompts(self._next, None))
        self._next += 1
        return stats

    def _launch(self, number: int, key: tuple[str, int], version: int, samples: list[PromptSample]) -> None:
        """Launch a rollout batch, and wait until the engine has its requests, so that later weights come after them."""
        submitted, stream = threading.Event(), self.stream()
        work = self._thread.start(self.collector.sample(samples, self.params, key, None, submitted.set, stream))
        work.add_done_callback(lambda _: submitted.set())
        self._in_flight.append(InFlightBatch(number, key, version, samples, work, stream))
        submitted.wait(SUBMITTED)

    def _give_up(self) -> None:
        for inflight in self._in_flight:
            inflight.work.cancel()
            inflight.stream.__exit__()
        self._in_flight.clear()

    def _restart(self, number: int, version: int) -> Stats:
        """Continue from an unexpected place in the data, such as the first, with nothing sampled ahead."""
        self._give_up()
        self._next = number
        self._late = version - self.begins(number)
        return self._launch_next(version)


def _plain(rollout: Rollout) -> dict[str, Any]:
    fields = {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}
    return {**fields, "finish": str(rollout.finish), "media": [one.state() for one in rollout.media]}


def _rollout(fields: dict[str, Any]) -> Rollout:
    media = tuple(Media(**one) for one in fields.get("media", ()))
    return Rollout(**{**fields, "finish": FinishReason(fields["finish"]), "media": media})
