"""Rollouts of a rollout batch: send weights, sample, reward, and select the groups to train on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from covey.core.engine import SamplingParams, traits_of
from covey.core.records import MicroStep, Mode, PromptSample, Rollout, RolloutBatch
from covey.core.stats import Stat
from covey.data.dynamic_sampling import PromptChooser, prompt_source
from covey.observability.activity import Counted
from covey.observability.record import Replay
from covey.rewards import RewardSuite
from covey.rewards.call import RewardStream
from covey.rollout.collector import Collector
from covey.rollout.speculation import Speculation, reuse_stats
from covey.runtime.user_code import call_all, preserve_process_state
from covey.trainer import rollout_reports as reports
from covey.trainer.async_rollouts import AsyncRollouts, InFlightBatch
from covey.trainer.engines.weight_sync import WeightSync
from covey.trainer.run import Run

PROBE_ROWS, PROBE_TOKENS = 4, 32  # completions that are sampled for the engine check alone, and their length at most

# ("train" or "eval", number of the rollout batch, and of a further round if any); samples are seeded with it.
RolloutKey = tuple[str | int, ...]
Stats = dict[str, Stat]


@dataclass(eq=False)
class RolloutPhase:
    """Samples and rewards the rollouts of each rollout batch."""

    run: Run
    collector: Collector
    params: SamplingParams  # sampling settings of training
    rewards: RewardSuite
    weight_sync: WeightSync
    speculation: Speculation | None  # reuse of earlier completions
    chooser: PromptChooser | None  # selects prompts by their rewards
    dataset: Any  # of training
    replay: Replay | None = None  # training's rollouts, from an earlier run's record; evaluations are sampled
    wants_routes: Callable[[], bool] = lambda: False  # True if training's next rollouts need their experts

    def __post_init__(self) -> None:
        self.failures = reports.FailureMonitor(self.run.collectives.named("count failed rollouts"))
        self.async_rollouts: AsyncRollouts | None = None  # samples ahead of training (`max_staleness` above 0)
        self._saved_async: dict[str, Any] | None = None
        self.rollout_batches = {"train": 0, "eval": 0}  # begun so far

    @property
    def chooses_prompts(self) -> bool:
        """True if this phase draws the prompts; the dataloader then only marks where rollout batches begin."""
        return self.run.args.max_staleness > 0 or (self.chooser is not None and self.chooser.draws)

    def next(self, step: MicroStep, mode: Mode) -> RolloutBatch:
        """The rollouts of the rollout batch that begins with `step`, or of an evaluation batch. Collective."""
        training, in_flight, restarted = mode == "train", None, Stats()
        if training and self.replay is not None:
            key = self.next_key(mode)
            return replace(self.replay.load(key[1]), key=key)
        if training and self.async_rollouts is not None and step.rollout_batch is not None:
            in_flight, restarted = self.async_rollouts.take(step.rollout_batch, self.run.step)
        key = self.next_key(mode) if in_flight is None else in_flight.key
        samples = step.samples if in_flight is None else in_flight.samples
        if training:
            self.run.timeline.begin(perf_counter())
        if self.chooser is None or not training:
            assert samples is not None, "the dataloader draws prompts unless a chooser does"
            sampled = self.sample(key, samples, mode, in_flight)
            return replace(sampled, stats=[restarted, *sampled.stats])
        scored = [self.sample(key, self.chooser.draw() if samples is None else samples, mode, in_flight)]
        rounds = [self.chooser.share(scored[0])]
        while (more := self.chooser.refill(rounds)) is not None:
            scored.append(self.sample((*key, len(rounds)), more, mode))
            rounds.append(self.chooser.share(scored[-1]))
        selection = self.chooser.select(scored, rounds)
        stats = [restarted, *chain.from_iterable(one.stats for one in scored)]
        return replace(selection.kept, key=key, selection=selection, stats=stats)

    def sample(
        self,
        key: RolloutKey,
        samples: list[PromptSample],
        mode: Mode,
        in_flight: InFlightBatch | None = None,
        params: SamplingParams | None = None,
    ) -> RolloutBatch:
        """Sample and reward one round of a rollout batch; `in_flight` if its sampling began earlier. Collective."""
        run, spec, log, stats = self.run, self.collector.spec, reports.RewardLog(), list[Stats]()
        reuse = self.speculation if mode == "train" else None  # an evaluation samples from scratch
        with self._located(key), self._stream(in_flight) as stream:
            if in_flight is not None:
                rollouts = in_flight.rollouts()
                stats.append(reports.staleness_stats(rollouts, run.step))
            else:
                stats.append(self.send_weights(mode))
                with run.phases("generate"), preserve_process_state():
                    run.activity.count(sum(not sample.absent for sample in samples))
                    counted = Counted(stream, run.activity)
                    settings = params or self.params
                    if mode == "train" and self.wants_routes():
                        settings = replace(settings, keep_routes=True)
                    rollouts = self.collector.collect(samples, settings, key, reuse, counted)
            self.failures.count(rollouts)
            if spec is not None:
                stats.append(reports.agent_stats(rollouts, spec))
                stats.append(reports.game_stats(samples, rollouts))
            elif self.collector.codec.vision is not None:  # an image may be broken, or larger than the context
                stats.append(reports.failure_stats(rollouts))
            try:
                with run.phases("reward"), preserve_process_state():
                    rows, functions = [sample.row for sample in samples], len(self.rewards.names)
                    run.activity.count(functions, -1)  # the first one that begins is the first one of all
                    begins = partial(run.activity.advance, 1)
                    result = self.rewards(rows, rollouts, log.context(run.state()), stream, begins)
            finally:
                if spec is not None:
                    spec.release(rollouts)
            reports.add_spans(run.timeline, stream, self.rewards.names)
        reused = reuse_stats(rollouts) if reuse is not None else {}
        stats.append({**result.stats, **log.metrics, **reused})
        rewards = reports.without_failed_games(samples, rollouts, result.rewards)
        weights = torch.stack([self.rewards.weights_of(one.source) for one in samples] or [self.rewards.weights])
        stats.append(reports.opponent_stats(rollouts, rewards, weights))
        return RolloutBatch(samples, rollouts, rewards, log.columns, result.steps, key, stats=stats)

    def next_key(self, mode: Mode) -> tuple[str, int]:
        number = self.rollout_batches[mode]
        self.rollout_batches[mode] += 1
        return mode, number

    def begin_evaluation(self) -> None:
        """Sample with the same seeds as in every evaluation, so that only the model differs."""
        self.rollout_batches["eval"] = 0

    @contextmanager
    def _located(self, key: RolloutKey) -> Iterator[None]:
        """Add step and rollout batch to errors, which servers and rewards do not know."""
        try:
            yield
        except Exception as error:
            error.add_note(f"This was at step {self.run.step}, in {key[0]} rollout batch {key[1]}.")
            raise

    def _stream(self, in_flight: InFlightBatch | None = None) -> RewardStream:
        if in_flight is not None:
            return in_flight.stream
        return self.rewards.stream(self.run.state(), self.run.args.stream_rewards)

    @torch.no_grad()
    def launch(self, begins: int | None) -> list[Stats]:
        """Launch the rollout batches that may be sampled with the weights of this step. Collective.

        Args:
            begins: number of the rollout batch that the step begins with; None if it begins none.

        Returns:
            Metrics of sending weights.
        """
        stats = list[Stats]()
        if self.replay is not None:  # it holds what was sampled ahead
            return stats
        if self.async_rollouts is None:
            self.async_rollouts = self._async_rollouts()
            if self._saved_async is not None:
                given_up, sent = self.async_rollouts.load_state_dict(self._saved_async, self.run.step)
                stats.append(sent)
                self.rollout_batches["train"] -= given_up  # they are launched again, with the same seeds
        return [*stats, self.async_rollouts.launch(self.run.step, begins)]

    def _async_rollouts(self) -> AsyncRollouts:
        args, algebra, dataset = self.run.args, self.run.algebra, self.dataset
        rank, shuffle = self.run.collectives.rank, bool(args.shuffle_dataset)
        per_epoch = len(dataset) // algebra.prompts_per_rollout_batch if hasattr(dataset, "__len__") else None
        return AsyncRollouts(
            self.collector,
            self.params,
            prompt_source(dataset, self.chooser, algebra, rank, shuffle=shuffle, seed=args.resolved_data_seed),
            algebra,
            per_epoch,
            self.run.state().max_steps,
            args.max_staleness,
            next_key=partial(self.next_key, "train"),
            send_weights=self._send_weights,
            stream=self._stream,
            waiting=lambda: self.run.phases("wait"),
        )

    def probe(self, wanted: Callable[[], bool]) -> list[Rollout]:
        """Short rollouts of the current weights, for the engine check alone; none before the first update."""
        asynchronous, version = self.async_rollouts, self.run.step
        samples = asynchronous.newest_samples(version)[:PROBE_ROWS] if asynchronous is not None and version else []
        if not samples or not wanted():
            return []
        params = replace(self.params, max_tokens=min(self.params.max_tokens, PROBE_TOKENS))
        with self.run.phases("generate"):
            return self.collector.collect(samples, params, ("probe", version))

    def cancel(self) -> None:
        """Give up what is in flight; the weights are sent again before the next sampling."""

        def forget() -> None:
            self.async_rollouts, self._saved_async = None, None
            self.weight_sync.forget()

        call_all(*([] if self.async_rollouts is None else [self.async_rollouts.close]), forget)

    def close(self) -> None:
        spec = self.collector.spec
        call_all(self.rewards.close, *([] if spec is None else [spec.close]))

    def send_weights(self, mode: Mode) -> Stats:
        """Send the current weights before sampling; rollouts in flight keep theirs. Returns metrics. Collective."""
        for opponents in self.collector.opponents:
            opponents.keep(self.run.step, copies=mode == "train")
        if self.async_rollouts is None:
            return self._send_weights(self.run.step)
        if mode == "eval":
            self.async_rollouts.settle()
        return self.async_rollouts.bring_weights(self.run.step)

    def _send_weights(self, version: int) -> Stats:
        with self.run.phases("sync"):
            shares = traits_of(self.collector.engine).shares_policy
            return {} if shares else self.weight_sync.ensure_current(version)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generations": self.rollout_batches,
            "async_rollouts": self.async_rollouts.state_dict() if self.async_rollouts is not None else None,
            "prompts": self.chooser.state_dict() if self.chooser is not None else None,
            "speculation": self.speculation.state_dict() if self.speculation is not None else None,
            "opponents": [one.state_dict() for one in self.collector.opponents],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollout_batches = dict(state["generations"])
        self._saved_async = state["async_rollouts"]
        if self._saved_async is not None and self.run.args.max_staleness == 0:  # these are sampled again
            self.rollout_batches["train"] -= len(self._saved_async["flights"])
        for opponents, kept in zip(self.collector.opponents, state.get("opponents", ()), strict=False):
            opponents.load_state_dict(kept)
        for name, part in (("prompts", self.chooser), ("speculation", self.speculation)):
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])
