"""Attributes of TRL's trainers that callbacks and scripts read; here they are read-only views."""

from collections.abc import Callable, Iterable
from typing import Any

from transformers import TrainingArguments

from covey.config.base import OLD
from covey.config.rloo import RLOOConfig
from covey.observability.metrics import MetricLog

VIEWS: dict[str, Callable[[Any], Any]] = {
    "epsilon_low": lambda trainer: trainer.args.epsilon,
    "epsilon_high": lambda trainer: trainer.args.resolved_epsilon_high,
    "ref_model": lambda trainer: None if trainer.reference is None else trainer.reference.copy,
    "reward_funcs": lambda trainer: listed(trainer.made_of.get("reward_funcs")),
    "reward_func_names": lambda trainer: list(trainer.rewards.names),
    "reward_weights": lambda trainer: trainer.rewards.weights.clone(),
    "reward_processing_classes": lambda trainer: (
        listed(trainer.made_of.get("reward_processing_classes")) or [None] * len(trainer.reward_funcs)
    ),
    "tools": lambda trainer: listed(trainer.made_of.get("tools")),
    "environment_factory": lambda trainer: trainer.made_of.get("environment_factory"),
    "rollout_func": lambda trainer: trainer.made_of.get("rollout_func"),
    "aux_loss_enabled": lambda trainer: trainer.balance.coef != 0,
    "aux_loss_coef": lambda trainer: trainer.balance.coef,
    "use_liger_kernel": lambda trainer: trainer.args.use_liger_kernel,
    "chat_template": lambda trainer: trainer.collector.codec.tokenizer.chat_template,
    "pad_token": lambda trainer: trainer.collector.codec.tokenizer.pad_token,
    "pad_token_id": lambda trainer: trainer.collector.codec.tokenizer.pad_token_id,
    "eos_token_id": lambda trainer: trainer.collector.codec.tokenizer.eos_token_id,
    "num_generations_eval": lambda trainer: trainer.args.num_generations_eval or trainer.args.num_generations,
    "chat_template_kwargs": lambda trainer: trainer.args.chat_template_kwargs or {},
    "_metrics": lambda trainer: {mode: OpenWindow(trainer.metrics, mode) for mode in ("train", "eval")},
}
"""Trainer -> value. In addition, each field of the config that is no field of `TrainingArguments`."""

ABSENT = {
    "environments": "each rollout makes its own by `environment_factory`",
    "generation_config": "settings of sampling are fields of `trainer.args`",
    **dict.fromkeys(("llm", "vllm_client", "vllm_generation"), "sample with `trainer.generate_completions(prompts)`"),
    "_logs": "completions are in the files of `log_completions`",
    "_step": "`trainer.state.global_step` counts optimizer steps",
}
"""Attributes of TRL's trainers that there are not, with advice."""

FIELDS = frozenset(RLOOConfig.__dataclass_fields__) - frozenset(TrainingArguments.__dataclass_fields__) - OLD


class OpenWindow(dict[str, list[float]]):
    """Values by name since the last log; a script may append to those of names of its own."""

    def __init__(self, metrics: MetricLog, mode: str):
        super().__init__({name: Appended(metrics, mode, name, value) for name, value in metrics.so_far(mode).items()})
        self.metrics, self.mode = metrics, mode

    def __missing__(self, name: str) -> list[float]:
        return Appended(self.metrics, self.mode, name)

    def __setitem__(self, name: str, values: list[float]) -> None:
        raise AttributeError(f"_metrics[{self.mode!r}][{name!r}] cannot be assigned: append a value to it.")

    def setdefault(self, name: str, default: Any = None) -> list[float]:
        return self[name]


class Appended(list[float]):
    """The value of one name; what is appended is averaged over processes and the window."""

    def __init__(self, metrics: MetricLog, mode: str, name: str, *values: float):
        super().__init__(values)
        self.metrics, self.mode, self.name = metrics, mode, name

    def append(self, value: float) -> None:
        from covey.trainer.rollout_reports import RewardLog  # which imports this module

        log = RewardLog()
        log.log_metric(self.name, value)
        self.metrics.add(log.metrics, self.mode)
        super().append(value)

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.append(value)


class View:
    """An attribute of a trainer that is read from what the run uses, and so cannot be assigned."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, trainer: Any, kind: type) -> Any:
        if trainer is None:
            return self
        return VIEWS[self.name](trainer) if self.name in VIEWS else getattr(trainer.args, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(
            f"{type(trainer).__name__}.{self.name} cannot be assigned: the run would not use it. Give it to the"
            " trainer, or to its config, when they are made."
        )


def listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
