"""Rollouts of a generation: send weights, sample, reward, and select the groups to train on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from covey.core.engine import SamplingParams
from covey.core.records import Mean, Rollout, Stat, merge_all
from covey.data.dynamic_sampling import PromptChooser, ScoredRollouts, Selection
from covey.data.prompt_source import prompt_source
from covey.data.sampler import MicroStep
from covey.observability.timeline import ROLLOUTS, Span, Timeline, covered
from covey.rewards import RewardSuite
from covey.rewards.batch import RewardContext
from covey.rewards.streaming import RewardStream
from covey.rollout.collector import Collector, PromptSample
from covey.rollout.speculation import Speculation, reuse_stats
from covey.rollout.user_batch_function import BatchFunction
from covey.runtime.user_code import preserve_process_state
from covey.trainer.async_rollouts import AsyncRollouts, InFlightBatch, LaunchSchedule, staleness_stats
from covey.trainer.build_rollouts import FailureMonitor, agent_stats, failure_stats, without_failed
from covey.trainer.context import RunContext
from covey.trainer.weight_sync import WeightSync

PROBE_ROWS, PROBE_TOKENS = 4, 32
"""Completions that are sampled for the engine check alone, and their length at most."""

GenerationKey = tuple[str | int, ...]
"""("train" or "eval", number of the generation, and of the refill if any); samples are seeded with it."""


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of one generation.

    Attributes:
        key: names the generation.
        scored: this process's share.
        selection: the groups selected by their rewards (dynamic sampling, prompts by difficulty), if anything.
    """

    key: GenerationKey
    scored: ScoredRollouts
    selection: Selection | None = None


@dataclass
class RewardLog:
    """Columns and metrics that reward functions log while they run.

    Attributes:
        columns: extra columns of the completions table, by name, one value per rollout of this process.
        metrics: scalars by name.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Stat] = field(default_factory=dict)

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the completions table."""
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric, averaged over calls, processes and the logging window."""
        merge_all(self.metrics, {name: Mean(float(value), 1.0)})

    def context(self, trainer_state: Any) -> RewardContext:
        """The context that reward functions get."""
        return RewardContext(trainer_state, self.log_extra, self.log_metric)


class RolloutListener:
    """Times rollouts as they end, and streams them to rewards; leaving this context gives those up.

    Args:
        stream: scores rollouts as they end; None where rewards wait for the generation's turn.

    Attributes:
        stream: as above.
        spans: begin and end of every rollout, in the order of their ends.
    """

    def __init__(self, stream: RewardStream | None = None):
        self.stream = stream
        self.spans: list[Span] = []
        self._began = perf_counter()

    def __enter__(self) -> "RolloutListener":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*raised)

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """Rollouts have ended."""
        now = perf_counter()
        self.spans += [(now - rollout.seconds if rollout.seconds else self._began, now) for rollout in rollouts]
        if self.stream is not None:
            self.stream.on_rollouts(place, rows, rollouts)

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        """All rollouts of a group have ended."""
        if self.stream is not None:
            self.stream.on_group(place, rows, rollouts)

    def tell(self, timeline: Timeline, names: list[str]) -> None:
        """Add everything to a timeline, once the generation has been scored.

        Args:
            timeline: gets the spans.
            names: of the reward functions.
        """
        timeline.add(ROLLOUTS, "", self.spans)
        if self.stream is None:
            return
        calls = self.stream.spans()
        for index, spans in calls.items():
            timeline.add(names[index], "", spans)
        last = max((end for _, end in self.spans), default=self._began)
        timeline.overlap("reward", covered((span for spans in calls.values() for span in spans), until=last))


class RolloutPhase:
    """Samples and rewards the rollouts of each generation.

    Args:
        context: of the run.
        collector: samples with the engine.
        params: sampling settings.
        rewards: scores rollouts.
        weight_sync: sends the policy's weights to the engine.
        speculation: earlier completions that samples may begin with, or None.
        chooser: selects prompts by their rewards, or None.

    Attributes:
        async_rollouts: samples later generations while one is trained on (`max_staleness` above 0), or None.
        generations: how many have begun, by mode.
    """

    def __init__(
        self,
        context: RunContext,
        collector: Collector,
        params: SamplingParams,
        rewards: RewardSuite,
        weight_sync: WeightSync,
        speculation: Speculation | None,
        chooser: PromptChooser | None,
    ):
        self._context = context
        self.collector = collector
        self.params = params
        self.rewards = rewards
        self.weight_sync = weight_sync
        self.speculation = speculation
        self.chooser = chooser
        self._failures = FailureMonitor(context.collectives.named("count failed rollouts"))
        self.async_rollouts: AsyncRollouts | None = None
        self._saved_async: dict[str, Any] | None = None
        self.generations = {"train": 0, "eval": 0}

    @property
    def chooses_prompts(self) -> bool:
        """The dataloader only marks where generations begin; prompts are drawn here."""
        return self._context.args.max_staleness > 0 or (self.chooser is not None and self.chooser.history is not None)

    # ---- one generation --------------------------------------------------------------------------------------------

    def next(self, step: MicroStep) -> RolloutBatch:
        """The rollouts of the generation that begins with `step`, or of an evaluation batch. Collective."""
        training, in_flight = self._context.training, None
        if training and self.async_rollouts is not None and step.generation is not None:
            in_flight = self.async_rollouts.take(step.generation, self._context.step)
        key = self.next_key() if in_flight is None else in_flight.key
        samples = step.samples if in_flight is None else in_flight.draws
        if training:
            self._context.timeline.begin(perf_counter())
        if self.chooser is None or not training:
            assert samples is not None, "the dataloader draws prompts unless a chooser does"
            return RolloutBatch(key, self.sample(key, samples, in_flight))
        scored = [self.sample(key, self.chooser.draw() if samples is None else samples, in_flight)]
        rounds = [self.chooser.share(scored[0])]
        while (more := self.chooser.refill(rounds)) is not None:
            scored.append(self.sample((*key, len(rounds)), more))
            rounds.append(self.chooser.share(scored[-1]))
        selection = self.chooser.select(scored, rounds)
        return RolloutBatch(key, selection.kept, selection)

    def sample(
        self,
        key: GenerationKey,
        samples: list[PromptSample],
        in_flight: InFlightBatch | None = None,
        params: SamplingParams | None = None,
    ) -> ScoredRollouts:
        """Sample and reward one round of a generation. Collective.

        Args:
            key: names the round.
            samples: of this process.
            in_flight: the same, where sampling has begun earlier.
            params: sampling settings, where they differ from those of training.
        """
        context, spec, log = self._context, self.collector.spec, RewardLog()
        reuse = self.speculation if context.training else None  # an evaluation samples from scratch
        with self._located(key), self._listener(in_flight) as listener:
            if in_flight is not None:
                rollouts = in_flight.rollouts()
                context.metrics.add(staleness_stats(rollouts, context.step), "train")
            else:
                self._send_current_weights()
                with context.phases("generate"), preserve_process_state():
                    rollouts = self.collector.collect(samples, params or self.params, key, reuse, listener)
            failed = self._failures.count(rollouts)
            if spec is not None:
                context.metrics.add(agent_stats(rollouts, spec), context.mode)
            elif self.collector.codec.vision is not None:  # an image may be broken, or larger than the context
                context.metrics.add(failure_stats(rollouts), context.mode)
            try:
                with context.phases("reward"), preserve_process_state():
                    rows = [sample.row for sample in samples]
                    result = self.rewards(rows, rollouts, log.context(context.loop.state), listener.stream)
            finally:
                if spec is not None:
                    spec.release(rollouts)
            listener.tell(context.timeline, self.rewards.names)
        reused = reuse_stats(rollouts) if reuse is not None else {}
        context.metrics.add({**result.stats, **log.metrics, **reused}, context.mode)
        rewards = without_failed(result.rewards, rollouts) if failed else result.rewards
        return ScoredRollouts(samples, rollouts, rewards, log.columns, result.steps)

    def next_key(self) -> tuple[str, int]:
        """A name that no other generation has."""
        mode = self._context.mode
        number = self.generations[mode]
        self.generations[mode] += 1
        return mode, number

    @contextmanager
    def _located(self, key: GenerationKey) -> Iterator[None]:
        """Add step and generation to errors: those of servers and rewards know neither."""
        try:
            yield
        except Exception as error:
            error.add_note(f"This was at step {self._context.step}, in {key[0]} generation {key[1]}.")
            raise

    def _listener(self, in_flight: InFlightBatch | None) -> RolloutListener:
        if in_flight is not None:
            return in_flight.listener or RolloutListener()
        context = self._context
        return RolloutListener(self.rewards.stream(context.loop.state, context.args.stream_rewards))

    def generate_completions(self, prompts: Sequence[Any], **changes: Any) -> list[dict[str, Any]]:
        """See `OnlineTrainer.generate_completions`."""
        spec = self.collector.spec
        if spec is None or not isinstance(spec.play, BatchFunction):
            raise ValueError("`generate_completions` is there for a `rollout_func(prompts, trainer)`; there is none.")
        decode = self.collector.codec.tokenizer.decode
        return [
            {
                "prompt_ids": prompt_ids,
                "completion_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": decode(completion.token_ids, skip_special_tokens=True),
            }
            for prompt_ids, completion in spec.play.complete(prompts, **changes)
        ]

    # ---- async rollouts --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, generation: int | None) -> None:
        """At the beginning of an optimizer step, launch the generations that may be sampled with its weights.

        Args:
            generation: that whose training begins now, if one does.
        """
        if self.async_rollouts is None:
            self.async_rollouts = self._build_async_rollouts()
            if self._saved_async is not None:
                given_up = self.async_rollouts.load_state_dict(self._saved_async, self._context.step)
                self.generations["train"] -= given_up  # they are launched again, with the same seeds
        self.async_rollouts.launch(self._context.step, generation)

    def _build_async_rollouts(self) -> AsyncRollouts:
        context, args, algebra = self._context, self._context.args, self._context.algebra
        dataset = context.loop.train_dataset
        per_epoch = len(dataset) // algebra.prompts_per_generation if hasattr(dataset, "__len__") else None
        rank, shuffle = context.collectives.rank, bool(args.shuffle_dataset)
        return AsyncRollouts(
            self.collector,
            self.params,
            prompt_source(dataset, self.chooser, algebra, rank, shuffle=shuffle, seed=args.seed),
            LaunchSchedule(algebra, per_epoch, context.loop.state.max_steps),
            args.max_staleness,
            next_key=self.next_key,
            send_weights=self._send_weights,
            watch=lambda: self._listener(None),
            waiting=lambda: context.phases("wait"),
        )

    def newest_samples(self) -> list[PromptSample]:
        """Some samples of the generation that was launched with the current weights; none before the first update."""
        if self.async_rollouts is None or not self._context.step:
            return []
        return self.async_rollouts.newest_draws(self._context.step)[:PROBE_ROWS]

    def probe(self, samples: list[PromptSample]) -> list[Rollout]:
        """Short rollouts of the current weights, for the engine check alone."""
        params = replace(self.params, max_tokens=min(self.params.max_tokens, PROBE_TOKENS))
        with self._context.phases("generate"):
            return self.collector.collect(samples, params, ("probe", self._context.step))

    def cancel(self) -> None:
        """Give up what is in flight; the weights are sent again before the next sampling."""
        if self.async_rollouts is not None:
            self.async_rollouts.close()
        self.async_rollouts, self._saved_async = None, None
        self.weight_sync.forget()

    def close(self) -> None:
        """Close the environments that rollouts act in."""
        if self.collector.spec is not None:
            self.collector.spec.close()

    def _send_current_weights(self) -> None:
        """Send the current weights before sampling; what is in flight goes on with those that it began with."""
        if self.async_rollouts is None:
            self._send_weights(self._context.step)
            return
        if not self._context.training:
            self.async_rollouts.settle()
        self.async_rollouts.bring_weights(self._context.step)

    def _send_weights(self, version: int) -> None:
        with self._context.phases("sync"):
            self._context.metrics.add(self.weight_sync.ensure_current(version), self._context.mode)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, what is in flight, and the states of chooser and speculation."""
        return {
            "generations": self.generations,
            "async_rollouts": self.async_rollouts.state_dict() if self.async_rollouts is not None else None,
            "prompts": self.chooser.state_dict() if self.chooser is not None else None,
            "speculation": self.speculation.state_dict() if self.speculation is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; async rollouts are resumed at the next launch."""
        self.generations = dict(state["generations"])
        self._saved_async = state["async_rollouts"]
        if self._saved_async is not None and self._context.args.max_staleness == 0:  # these are sampled again
            self.generations["train"] -= len(self._saved_async["flights"])
        if self.chooser is not None and state["prompts"] is not None:
            self.chooser.load_state_dict(state["prompts"])
        if self.speculation is not None and state["speculation"] is not None:
            self.speculation.load_state_dict(state["speculation"])
