"""How a trainer comes by the completions of a generation: sampled now, or taken from what was sampled ahead.

Not here: what is launched ahead, and when (`covey.trainer.async_rollouts`), and what becomes of the completions
(`covey.trainer.trainer`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from covey.core.batch import collate
from covey.core.engine import SamplingParams
from covey.data.dynamic_sampling import ScoredRollouts
from covey.data.sampler import started
from covey.observability.metrics import MetricLog
from covey.observability.timeline import Timeline
from covey.rewards import RewardSuite
from covey.rollout.collector import Collector, PromptSample
from covey.rollout.speculation import Speculation, reuse_stats
from covey.rollout.user_batch_function import BatchFunction
from covey.runtime.user_code import preserve_process_state
from covey.trainer.async_rollouts import AsyncRollouts, InFlightBatch
from covey.trainer.build import build_ahead
from covey.trainer.build_rollouts import FailureMonitor, agent_stats, failure_stats, without_failed
from covey.trainer.engine_check.parity import EngineCheck
from covey.trainer.generation_log import RewardLog
from covey.trainer.rollout_events import RolloutListener
from covey.trainer.staleness import staleness_stats
from covey.trainer.update_phase import PolicyUpdates
from covey.trainer.weight_sync import WeightSync

PROBE_ROWS, PROBE_TOKENS = 4, 32
"""Completions that are sampled for the check of the engine alone, and their length at most."""


class SampledGenerations(PolicyUpdates):
    """The sampling part of a trainer. `OnlineTrainer` provides the parts declared here."""

    collector: Collector
    sampling: SamplingParams
    speculation: Speculation | None
    rewards: RewardSuite
    metrics: MetricLog
    weight_sync: WeightSync
    engine_check: EngineCheck
    timeline: Timeline
    rollout_watch: FailureMonitor
    ahead: AsyncRollouts | None = None
    """What is sampled while a generation is trained on, with `max_staleness` above 0."""
    _ahead_state: dict[str, Any] | None = None
    """The same, as a checkpoint holds it, until training goes on."""

    def _sample(
        self, key: tuple[str | int, ...], draws: list[PromptSample], number: int, flight: InFlightBatch | None = None
    ) -> ScoredRollouts:
        """Sample and score one round of a generation; rounds after round 0 are refills, never sampled ahead."""
        key = (*key, number) if number else key
        reuse = self.speculation if self.model.training else None  # an evaluation samples afresh
        ahead = flight if number == 0 else None
        notes = RewardLog()
        if number == 0 and self.model.training:
            self.timeline.begin(perf_counter())
        with self._saying_when(key), self._watched(ahead) as watched:
            if ahead is not None:
                rollouts = ahead.rollouts()
                self.metrics.add(staleness_stats(rollouts, self.state.global_step), "train")
            else:
                self._bring_weights()
                with self.phases("generate"), preserve_process_state():
                    rollouts = self.collector.collect(draws, self.sampling, key, reuse, watched)
            self.rollout_watch.judge(rollouts)
            if self.collector.spec is not None:
                self.metrics.add(agent_stats(rollouts, self.collector.spec), self.mode)
            elif self.collector.codec.vision is not None:  # a picture may be broken, or larger than the context
                self.metrics.add(failure_stats(rollouts), self.mode)
            try:
                with self.phases("reward"), preserve_process_state():
                    rows = [draw.row for draw in draws]
                    scored = self.rewards(rows, rollouts, notes.context(self.state), watched.stream)
            finally:
                if self.collector.spec is not None:
                    self.collector.spec.release(rollouts)
            watched.tell(self.timeline, self.rewards.names)
        drafts = reuse_stats(rollouts) if reuse is not None else {}
        self.metrics.add({**scored.stats, **notes.metrics, **drafts}, self.mode)
        return ScoredRollouts(draws, rollouts, without_failed(scored.rewards, rollouts), notes.columns, scored.steps)

    def generate_completions(self, prompts: Sequence[Any], **changes: Any) -> list[dict[str, Any]]:
        """For a `rollout_func(prompts, trainer)`, while it runs: one completion of each prompt.

        Args:
            prompts: texts, messages or lists of tokens.
            changes: settings that differ from the config's: `max_tokens`, `temperature`, `top_k`, `top_p`, ...

        Returns:
            For each a dictionary with `prompt_ids`, `completion_ids`, `logprobs` and `text`.

        Raises:
            ValueError: called at another time, or with a setting that does not exist.
        """
        function = self.collector.spec.play if self.collector.spec is not None else None
        if not isinstance(function, BatchFunction):
            raise ValueError("`generate_completions` is there for a `rollout_func(prompts, trainer)`; there is none.")
        decode = self.collector.codec.tokenizer.decode
        return [
            {
                "prompt_ids": prompt_ids,
                "completion_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": decode(completion.token_ids, skip_special_tokens=True),
            }
            for prompt_ids, completion in function.complete(prompts, **changes)
        ]

    @contextmanager
    def _saying_when(self, key: tuple[str | int, ...]) -> Iterator[None]:
        """An error that leaves this context says when it happened: those of servers and rewards know no steps."""
        try:
            yield
        except Exception as error:
            error.add_note(f"This was at step {self.state.global_step}, in {key[0]} generation {key[1]}.")
            raise

    def _watched(self, ahead: InFlightBatch | None) -> RolloutListener:
        """What hears, or has heard, of the rollouts of this round as they end."""
        if ahead is not None:
            return ahead.watched
        return RolloutListener(self.rewards.stream(self.state, self.args.stream_rewards))

    def _generation_key(self) -> tuple[str, int]:
        """A name for this generation that no other has: its samples are seeded with it."""
        number = self._generations[self.mode]
        self._generations[self.mode] += 1
        return self.mode, number

    # ---- sampling ahead --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sample_ahead(self, draws: list[PromptSample]) -> None:
        if self.args.max_staleness == 0 or self._micro_step:
            return
        if self.ahead is None:
            self.ahead = build_ahead(self, self._generation_key, self._send_weights)
            if self._ahead_state is not None:
                given_up = self.ahead.load_state_dict(self._ahead_state, self.state.global_step)
                self._generations["train"] -= given_up  # they are launched again, with the same seeds
        self.ahead.launch(self.state.global_step, started(draws))
        self._probe_engine()

    def _sampled_ahead(self, draws: list[PromptSample]) -> InFlightBatch | None:
        """The generation that begins, where it was sampled ahead."""
        generation = started(draws) if self.ahead is not None and self.model.training else None
        if self.ahead is None or generation is None:
            return None
        return self.ahead.take(generation, self.state.global_step)

    def _end_rollouts(self) -> None:
        if self.collector.spec is not None:
            self.collector.spec.close()

    def _forget_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.ahead, self._ahead_state = None, None
        self.weight_sync.forget()

    def _bring_weights(self) -> None:
        """Let the engine have the current weights before it samples; what is sampled ahead stays as it was begun."""
        if self.ahead is None:
            self._send_weights(self.state.global_step)
            return
        if not self.model.training:
            self.ahead.settle()
        self.ahead.bring_weights(self.state.global_step)

    def _send_weights(self, version: int) -> None:
        """Bring an engine that has weights of its own to `version`, the current one. Collective."""
        with self.phases("sync"):
            self.metrics.add(self.weight_sync.ensure_current(version), self.mode)

    def _probe_engine(self) -> None:
        """Compare engine and trainer on a few samples of current weights, where training sees staler ones alone."""
        version = self.state.global_step
        draws = self.ahead.newest_draws(version)[:PROBE_ROWS] if self.ahead is not None and version else []
        if not draws or not self.engine_check.wants_samples():
            return
        params = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, PROBE_TOKENS))
        with self.phases("generate"):
            rollouts = self.collector.collect(draws, params, ("probe", version))
        batch = collate(rollouts).to(self.accelerator.device)
        with self.phases("score"):
            self._settle_layout(batch)
            self.engine_check(batch)
