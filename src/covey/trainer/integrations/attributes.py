"""Attributes of TRL's trainers: callbacks and scripts read them, and change those that a run reads while it trains.

Assigning another, or a method that is never called, is refused with advice; assigning the value that is there is not.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, Trainer, TrainingArguments

from covey.config.aliases import HOOKS, NOT_NEEDED
from covey.config.base import OLD
from covey.config.rloo import RLOOConfig
from covey.observability.metrics import MetricLog
from covey.rewards.suite import as_weights
from covey.runtime.overrides import passes_through
from covey.runtime.user_code import warn

VIEWS: dict[str, Callable[[Any], Any]] = {
    "epsilon_low": lambda trainer: current(trainer, "epsilon"),
    "epsilon_high": lambda trainer: trainer.run.method.config().resolved_epsilon_high,
    "ref_model": lambda trainer: None if trainer.reference is None else trainer.reference.copy,
    "reward_funcs": lambda trainer: RewardFunctions(trainer),
    "reward_func_names": lambda trainer: FixedList(trainer.rewards.names, "reward_func_names"),
    "reward_weights": lambda trainer: trainer.rewards.weights,
    "reward_processing_classes": lambda trainer: FixedList(
        as_list(trainer.made_of.get("reward_processing_classes")) or [None] * len(trainer.reward_funcs),
        "reward_processing_classes",
    ),
    "tools": lambda trainer: FixedList(as_list(trainer.made_of.get("tools")), "tools"),
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
    "chat_template_kwargs": lambda trainer: FixedDict(trainer.args.chat_template_kwargs or {}, "chat_template_kwargs"),
    "generation_kwargs": lambda trainer: FixedDict(trainer.args.generation_kwargs or {}, "generation_kwargs"),
    "generation_config": lambda trainer: FixedGenerationConfig(trainer),
    "entropy_coef": lambda trainer: (
        trainer.args.entropy_coef if trainer.updates.entropy is None else trainer.updates.entropy.coef
    ),
    "_metrics": lambda trainer: {mode: OpenWindow(trainer.metrics, mode) for mode in ("train", "eval")},
}
"""Trainer -> value. In addition, each field of the config that is no field of `TrainingArguments`."""

ABSENT = {
    "environments": "each rollout makes its own by `environment_factory`",
    **dict.fromkeys(("llm", "vllm_client", "vllm_generation"), "sample with `trainer.generate_completions(prompts)`"),
    "_logs": "completions are in `record/`, and with `export_completions` in files",
    "_step": "`trainer.state.global_step` counts optimizer steps",
}
"""Attributes of TRL's trainers that these do not have, with advice."""

FIELDS = frozenset(RLOOConfig.__dataclass_fields__) - frozenset(TrainingArguments.__dataclass_fields__) - OLD

LIVE = {
    "beta": "beta",
    "epsilon": "epsilon",
    "epsilon_low": "epsilon",
    "epsilon_high": "epsilon_high",
    "delta": "delta",
}
"""Attributes that may change while a run trains, and the fields of the config that they set."""

SAMPLED = (
    "a `rollout_func(prompts, trainer)` samples with any: `trainer.generate_completions(prompts, temperature=...)`"
)
ADVICE = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_config"), SAMPLED),
    "generation_kwargs": SAMPLED,
    "num_generations": "begin a second run with the first one's model for groups of another size",
    "max_completion_length": "begin a second run with the first one's model for longer completions",
    "reward_func_names": "a function is called by its `__name__`",
    "tools": "let a tool itself refuse to work until it should",
    "ref_model": "`sync_ref_model` moves the reference",
}
"""What to do instead of assigning an attribute that a run reads once."""

NOT_CALLED = {
    "data_collator": "transform rows with `dataset.map`, or as they are read with `dataset.set_transform`",
    "compute_metrics": "log values from a reward function with its argument `log_metric`",
    "preprocess_logits_for_metrics": "evaluations sample completions, and keep no logits",
    "compute_loss_func": HOOKS["_compute_loss"],
    "label_smoother": HOOKS["_compute_loss"],
}
"""Attributes of transformers' trainer that are never read, with advice."""


class OpenWindow(dict[str, list[float]]):
    """Values by name since the last log; a script may append values under names of its own."""

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


# ---- values that a run has read already ------------------------------------------------------------------------------


def refuse(name: str) -> NoReturn:
    advice = f"; {ADVICE[name]}" if name in ADVICE else ""
    raise AttributeError(
        f"`trainer.{name}` cannot be changed: the run would not use it. Give it to the trainer, or to its config, when"
        f" they are made{advice}."
    )


class FixedList(list[Any]):
    """A list whose changes the run would not see."""

    def __init__(self, items: Iterable[Any], name: str):
        super().__init__(items)
        self.name = name

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        refuse(self.name)

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse


class FixedDict(dict[str, Any]):
    """A dictionary whose changes the run would not see."""

    def __init__(self, items: dict[str, Any], name: str):
        super().__init__(items)
        self.name = name

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        refuse(self.name)

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


class RewardFunctions(FixedList):
    """The user's reward functions; assigning an element replaces that function in the run."""

    def __init__(self, trainer: Any):
        super().__init__(as_list(trainer.made_of.get("reward_funcs")), "reward_funcs")
        self.trainer = trainer

    def __setitem__(self, index: Any, function: Any) -> None:  # type: ignore[override]
        place = range(len(self))[index]  # IndexError for one that is not there
        if not isinstance(place, int):
            self._refuse()
        self.trainer.rewards.replace(place, function)
        list.__setitem__(self, place, function)
        self.trainer.made_of["reward_funcs"] = list(self)


class FixedGenerationConfig(GenerationConfig):
    """Sampling settings of a run, to be read."""

    def __init__(self, trainer: Any):
        args, views = trainer.args, ("pad_token_id", "eos_token_id")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(args, name) for name in names} | {name: VIEWS[name](trainer) for name in views}
        super().__init__(max_new_tokens=args.max_completion_length, do_sample=True, **given)
        vars(self)["_is_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in vars(self) and not (name in vars(self) and is_same(vars(self)[name], value)):
            refuse("generation_config")
        super().__setattr__(name, value)


# ---- values that a run reads while it trains -------------------------------------------------------------------------


def current(trainer: Any, field: str) -> Any:
    """Value of a field of the config, as the run has it now."""
    return trainer.run.method.changed.get(field, getattr(trainer.args, field))


def change_loss(name: str, trainer: Any, value: Any) -> None:
    """Set a number of the loss from this step on. Call it on every process alike."""
    if name == "beta" and value and trainer.reference is None:
        raise AttributeError(
            f"`trainer.beta` cannot become {value}: the run began with beta=0, so there is no reference model. Begin"
            " with a small one, such as beta=1e-6."
        )
    trainer.run.method.change(LIVE[name], value)


def change_weights(trainer: Any, weights: Any) -> None:
    """Set the weights of all reward functions."""
    known = trainer.rewards.weights
    given = weights.tolist() if isinstance(weights, Tensor) else list(weights)
    known.copy_(as_weights(given, len(known)))


def change_functions(trainer: Any, functions: Any) -> None:
    """Replace each of the user's reward functions."""
    known, given = RewardFunctions(trainer), as_list(functions)
    if len(given) != len(known):
        raise AttributeError(
            f"`trainer.reward_funcs` has {len(known)} functions and cannot become {len(given)}: their number is that of"
            " the metrics and of `reward_weights`. Let a function return None where it should not count."
        )
    for index, function in enumerate(given):
        if function is not known[index]:
            known[index] = function


def change_entropy_coef(trainer: Any, value: float) -> None:
    controller = trainer.updates.entropy
    if controller is None:
        raise AttributeError(
            f"`trainer.entropy_coef` cannot become {value}: the run began without an entropy bonus. Begin with a small"
            " one, such as entropy_coef=1e-6."
        )
    controller.coef = float(value)


SETTERS: dict[str, Callable[[Any, Any], None]] = {
    **{name: partial(change_loss, name) for name in LIVE},
    "reward_weights": change_weights,
    "reward_funcs": change_functions,
    "entropy_coef": change_entropy_coef,
}


class View:
    """An attribute of a trainer with the run's current value; assigning one changes the run, or is refused."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, trainer: Any, kind: type) -> Any:
        if trainer is None:
            return self
        if self.name in VIEWS:
            return VIEWS[self.name](trainer)
        return current(trainer, self.name) if is_made(trainer) else getattr(trainer.args, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        if not is_made(trainer):
            refuse(self.name)
        if not is_same(self.__get__(trainer, type(trainer)), value):
            SETTERS.get(self.name, lambda trainer, value: refuse(self.name))(trainer, value)


class NotCalled:
    """A method or attribute that TRL's or transformers' trainer reads and this one does not, so it is not assigned."""

    def __init__(self, name: str, inherited: Any):
        self.name, self.inherited = name, inherited

    def __get__(self, trainer: Any, kind: type) -> Any:
        if trainer is not None and self.name in vars(trainer):
            return vars(trainer)[self.name]
        if self.inherited is None and trainer is None:
            return self
        if self.inherited is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return self.inherited.__get__(trainer, kind)

    def __set__(self, trainer: Any, value: Any) -> None:
        if self.name in NOT_CALLED:
            begun = "made_of" in vars(trainer)  # while it is made, transformers' trainer sets them
            if (is_made(trainer) or not begun) and not is_same(vars(trainer).get(self.name), value):
                refuse_assigned(self.name, NOT_CALLED[self.name])
        elif self.name in NOT_NEEDED or passes_through(value, self.name):
            advice = {**HOOKS, **NOT_NEEDED}[self.name]
            warn(f"`trainer.{self.name}` was assigned, and is not called here: {advice}.")
        else:
            refuse_assigned(self.name, HOOKS[self.name])
        vars(trainer)[self.name] = value


def refuse_assigned(name: str, advice: str) -> NoReturn:
    raise AttributeError(f"`trainer.{name}` was assigned, and is not called here: {advice}.")


def add_attributes(kind: type) -> None:
    """Give a class of trainers the attributes of TRL's."""
    for name in {*VIEWS, *FIELDS}:
        setattr(kind, name, View(name))
    for name in {*HOOKS, *NOT_NEEDED, *NOT_CALLED}:
        setattr(kind, name, NotCalled(name, vars(kind).get(name, vars(Trainer).get(name))))


def warn_of_unused_methods(model: Any) -> None:
    if "generate" in vars(model):
        warn(
            "`model.generate` was assigned, and is never called: the run's engine samples. Give the trainer a"
            " `rollout_func`, or an `engine` of your own."
        )


def is_made(trainer: Any) -> bool:
    return "report" in vars(trainer)  # the last part of it


def is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, RewardFunctions):
        other = as_list(other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        return both and torch.equal(one.cpu(), other.cpu().to(one.dtype))
    try:
        return bool(one == other) and type(one) in (type(other), FixedList, FixedDict, RewardFunctions, int, float)
    except Exception:  # of the user's values
        return False


def as_list(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
