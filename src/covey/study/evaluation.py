"""The evaluation that all variants of a study have in common: the same prompts, sampling settings and rewards."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from covey.config.aliases import ALIASES
from covey.core.advantages import weighted_total
from covey.core.records import PromptSample
from covey.rewards import RewardSuite
from covey.study.variants import TRAINERS, with_system
from covey.trainer.build import build_rewards, sampling_params
from covey.trainer.evaluation.suites import SAMPLING

# of the study, whatever a variant trains with
SETTINGS = (*SAMPLING, "num_generations", "max_completion_length", "generation_kwargs", "reward_weights")


class CommonEvaluation:
    """Mean rewards by prompt of one variant, by the rewards and the sampling settings of the study."""

    def __init__(
        self, common: Mapping[str, Any], changes: Mapping[str, Any], rows: Sequence[dict[str, Any]], reward_funcs: Any
    ):
        self.common, self.changes = (
            {ALIASES[name].new if name in ALIASES else name: value for name, value in settings.items()}
            for settings in (common, changes)
        )
        self.reward_funcs = reward_funcs
        self.rows = list(with_system(changes.get("system_prompt", common.get("system_prompt")), rows))
        self.rewards: RewardSuite | None = None  # if the variant is trained with others

    @torch.no_grad()
    def __call__(self, trainer: Any) -> list[float]:
        """The mean reward of each prompt, over as many completions as the study's groups have, with the same seeds."""
        args, model, phase = self._settings(trainer.args), trainer.model, trainer.rollouts
        own, was_training = phase.rewards, model.training
        if self.rewards is None and {"reward_funcs", "reward_weights"} & {*self.changes}:
            context = replace(trainer.context, args=args)
            self.rewards = build_rewards(context, trainer.collector, self.reward_funcs, None)
        params = sampling_params(args, trainer.collector.codec.tokenizer)
        count = args.num_generations
        samples = [PromptSample(row, number, sample) for number, row in enumerate(self.rows) for sample in range(count)]
        model.eval()
        try:
            phase.rewards = self.rewards or own
            scored = phase.sample(("study", 0), samples, params=params)
            totals = weighted_total(scored.rewards.double(), phase.rewards.weights.double())
        finally:
            phase.rewards = own
            model.train(was_training)
            trainer.context.metrics.drain("eval")
        return totals.view(len(self.rows), count).nanmean(dim=1).tolist()

    def _settings(self, own: Any) -> Any:
        config_class, args = TRAINERS[self.common.get("method", "grpo")].config_class, copy.copy(own)
        for name in SETTINGS:
            if {name, "method"} & {*self.changes}:
                setattr(args, name, self.common.get(name, getattr(config_class, name, None)))
        return args

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
