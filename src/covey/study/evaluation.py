"""The evaluation that all variants of a study have in common: the same prompts, seeds, settings and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from covey.config.objective import EntropyFields, KLFields, LossFields
from covey.config.sampling import AgentFields, GenerationFields, PromptFields
from covey.config.training import BatchFields
from covey.core.advantages import weighted_total
from covey.core.records import PromptSample
from covey.rollout.agents import with_agent
from covey.runtime.user_code import preserve_process_state
from covey.trainer.build import build_collector, build_rewards, sampling_params
from covey.trainer.rollout_phase import RolloutPhase

SHAPES = ("seed", *(one.name for kind in (GenerationFields, AgentFields) for one in fields(kind)))  # of rollouts
LEARNING = {"per_device_train_batch_size", "gradient_accumulation_steps", "advantages", "pass_at_k"} | {
    one.name for kind in (BatchFields, EntropyFields, KLFields, LossFields, PromptFields) for one in fields(kind)
}  # settings that evaluations do not read, and that may fit those of the variants only
PARTS = ("tools", "rollout_func", "environment_factory", "agent")


@dataclass(eq=False)
class CommonEvaluation:
    """Mean rewards by prompt of one variant, by the rewards and the settings of the study, whatever it trains with."""

    args: Any  # config of the study, without the variant's changes
    rows: Sequence[dict[str, Any]]
    reward_funcs: Any
    has_own_rewards: bool  # the variant is trained with others
    phase: RolloutPhase | None = None  # made at the first evaluation

    @torch.no_grad()
    def __call__(self, trainer: Any) -> list[float]:
        """The mean reward of each prompt, over as many completions as the study's groups have, with the same seeds."""
        if self.phase is None:
            with preserve_process_state():  # environments that are made for it may draw random numbers
                self.phase = self._phase(trainer)
        phase = self.phase
        model, was_training, count = trainer.model, trainer.model.training, self.args.num_generations
        samples = [PromptSample(row, number, sample) for number, row in enumerate(self.rows) for sample in range(count)]
        model.eval()
        try:
            scored = phase.sample(("study", 0), samples)
            totals = weighted_total(scored.rewards.double(), phase.rewards.weights.double())
        finally:
            model.train(was_training)
            trainer.context.metrics.drain("eval")
        return totals.view(len(self.rows), count).nanmean(dim=1).tolist()

    def _phase(self, trainer: Any) -> RolloutPhase:
        context, collector = replace(trainer.context, args=self.args), trainer.collector
        tokenizer, rewards = collector.codec.tokenizer, trainer.rewards
        if any(getattr(self.args, name) != getattr(trainer.args, name) for name in SHAPES):
            tools, function, factory, agent = map(trainer.made_of.get, PARTS)
            factory = with_agent(agent, factory, tools, function)
            collector = build_collector(context, trainer.model, tokenizer, collector.engine, tools, function, factory)
            collector.run = trainer.collector.run
        if self.has_own_rewards:
            rewards = build_rewards(context, collector, self.reward_funcs, None)
        params = sampling_params(self.args, tokenizer)
        return replace(trainer.rollouts, context=context, collector=collector, params=params, rewards=rewards)

    def close(self, trainer: Any) -> None:
        """End what the evaluation has started, in addition to the trainer's own."""
        if self.phase is None:
            return
        if self.phase.rewards is not trainer.rewards:
            self.phase.rewards.close()
        if (spec := self.phase.collector.spec) is not None and spec is not trainer.collector.spec:
            spec.close()
