"""Trainers on tiny models, for the tests in this folder."""

from dataclasses import replace
from typing import Any
from unittest import mock

from covey import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from covey.trainer.integrations.report import RunReport
from tests.support import known_attributes, tiny, trials

write_page = RunReport.write
mock.patch.object(RunReport, "write", lambda self: None).start()  # a second each; tests marked `pages` do
trials.remember()

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def digits(completions, **kwargs):
    """The share of digits among the characters of a completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def longer(completion_ids, **kwargs):
    """One point per token and a tenth for each of the last digit of their sum: members of a group hardly ever tie."""
    return [len(ids) + sum(ids) % 10 / 10 for ids in completion_ids]


def config(output_dir: Any, method: str = "grpo", **changes: Any) -> Any:
    kind = GRPOConfig if method == "grpo" else RLOOConfig
    return kind(output_dir=str(output_dir), **{**DEFAULTS, **changes})


def trainer(
    output_dir: Any, method: str = "grpo", *, parts: dict[str, Any] | None = None, kind: Any = None, **changes: Any
) -> Any:
    """A trainer of a tiny model; `parts` are trainer arguments, `changes` config fields, `kind` another class."""
    known_attributes.guard()
    kind = kind or (GRPOTrainer if method == "grpo" else RLOOTrainer)
    arguments: dict[str, Any] = {
        "model": tiny.model(),
        "reward_funcs": longer,
        "train_dataset": tiny.rows(),
        "processing_class": tiny.tokenizer(),
    }
    return kind(args=config(output_dir, method, **changes), **{**arguments, **(parts or {})})


def experiences(trainer: Any, change: Any = lambda batch: batch) -> list[Any]:
    """The data (`TrainBatch`) of each rollout batch to train on from now on; `change` gives other data."""
    gather, found = trainer.gather_experience, []

    def gathering(rollouts: Any, mode: str, log: Any) -> Any:
        experience = gather(rollouts, mode, log)
        if mode != "train":
            return experience
        found.append(experience.batch)
        return replace(experience, batch=change(experience.batch))

    trainer.gather_experience = gathering
    return found


def scored(trainer: Any) -> list[Any]:
    """Of each rollout batch from now on: its data (`TrainBatch`) once it is scored, and the policy's log-probs."""
    score, found = trainer.behaviour.with_logprobs, []

    def scoring(batch: Any, mode: str, **asked: Any) -> Any:
        logprobs = trainer.batch_scorer.logprobs(trainer.policy, batch)
        result = score(batch, mode, **asked)
        found.append((result[0], logprobs))
        return result

    trainer.behaviour.with_logprobs = scoring
    return found


def weights(trained: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


def history(trained: Any, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]
