"""Comparisons of a run with the checkpoint that it resumes from: what must be the same, and what has changed."""

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from covey.config.algebra import BatchAlgebra
from covey.core.model import unwrapped
from covey.data.sources import Sources
from covey.policy.adapters import adapter_config, base_model, has_adapter
from covey.policy.quantization import quantization_method
from covey.policy.replicas import QUANTISED, Sample
from covey.rewards import RewardSuite
from covey.runtime.user_code import unwrap_partial, warn

# Settings that a checkpoint's optimizer holds: loading it puts the old ones back.
OF_THE_OPTIMIZER = frozenset(
    {"adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "optim_args", "weight_decay"}
)
# Schedules that follow a metric: their state holds their arguments, and is not that of another schedule.
FOLLOWING = ("greedy", "reduce_lr_on_plateau")
# Settings of a run's place and output, which may change unmentioned.
NOT_OF_TRAINING = re.compile(
    "(eval|hub|log|logging|push|report|resume|save|trackio|vllm_server|sglang_server|teacher_server)_.*|.*_(dir|folder|name|rank|key|token|url|urls)"
    "|disable_tqdm|do_.*|log_.*|project|accelerator_config"
)
# Settings of an adapter's origin and use, which may change unmentioned.
NOT_OF_AN_ADAPTER = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
)
# Settings that select which weights an adapter trains; the names of trained weights are compared instead.
SELECTING = frozenset(
    {"bias", "ensure_weight_tying", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_bias"}
    | {"modules_to_save", "target_modules", "use_dora"}
)
SAMPLED_ROWS = 16  # rows of a dataset that are compared

Changed = dict[str, tuple[str, str]]  # settings of an adapter: what the checkpoint has, and what this run has

Described = dict[str, dict[str, str]]  # settings, dataset and reward functions of a run, as texts by kind and name


def describe_run(args: Any, dataset: Any, rewards: RewardSuite) -> Described:
    """Texts that a resumed run is compared with; datasets without a length are left out."""
    settings = {name: repr(value) for name, value in args.to_dict().items() if not NOT_OF_TRAINING.fullmatch(name)}
    for source in dataset.sources if isinstance(dataset, Sources) else ():
        given = {field.name: getattr(source.settings, field.name) for field in dataclasses.fields(source.settings)}
        settings |= {f"sources.{source.name}.{name}": _shown(value) for name, value in given.items()}
    rows: dict[str, str] = {}
    if hasattr(dataset, "__len__") and len(dataset):
        places = sorted({number * (len(dataset) - 1) // (SAMPLED_ROWS - 1) for number in range(SAMPLED_ROWS)})
        rows = {"rows": str(len(dataset)), "content": _digest(_plain([dict(dataset[place]) for place in places]))}
    functions = (getattr(one, "function", one) for one in rewards.functions)
    codes = {name: _digest(_code(function)) for name, function in zip(rewards.names, functions, strict=True)}
    return {"settings": settings, "dataset": rows, "rewards": codes}


def _shown(value: Any) -> str:
    """A setting of a source as text; functions by their names, since each run makes them again."""
    functions = value if isinstance(value, list | tuple) else [value]
    if any(map(callable, functions)):
        return repr([getattr(one, "__name__", str(one)) for one in functions])
    return repr({key: _shown(one) for key, one in value.items()} if isinstance(value, dict) else value)


def changes_since(saved: Described, current: Described, adapter: Changed) -> list[str]:
    """Sentences on what has changed and whether it takes effect, as far as both runs were described."""
    was, now = (
        run["settings"] | {f"peft_config.{key}": texts[which] for key, texts in adapter.items() if key not in SELECTING}
        for which, run in enumerate((saved, current))
    )
    held = OF_THE_OPTIMIZER | {name for name in now if name.startswith("peft_config.init")}
    held |= {"entropy_coef"} if now.get("use_adaptive_entropy") == "True" else set()
    held |= {"lr_scheduler_kwargs"} if was.get("lr_scheduler_type", "").strip("'") in FOLLOWING else set()
    changed = [name for name in sorted(was.keys() & now) if was[name] != now[name]]
    if int(now.get("max_steps", 0)) > 0 and was.get("max_steps") == now["max_steps"]:
        changed = [name for name in changed if name != "num_train_epochs"]  # max_steps alone counts
    taken, idle = (
        [f"{name}={now[name]} (was {was[name]})" for name in changed if (name in held) == is_held]
        for is_held in (False, True)
    )
    sentences = [f"Takes effect: {', '.join(taken)}."] if taken else []
    if idle:
        sentences.append(
            f"Has no effect: {', '.join(idle)}, as the checkpoint holds it. For another value begin a new run from the"
            " weights, with the checkpoint as `model`."
        )
    was, now = saved["dataset"], current["dataset"]
    if was and now and was != now:
        size = f"{was['rows']} rows, now {now['rows']}" if was["rows"] != now["rows"] else "as many rows, other content"
        sentences.append(f"Takes effect: another dataset ({size}); the run continues at the same row.")
    was, now = saved["rewards"], current["rewards"]
    if names := sorted(name for name in was | now if was.get(name) != now.get(name)):
        sentences.append(f"Takes effect: other reward functions ({', '.join(names)}).")
    return sentences


def _code(function: Any) -> str:
    """The source of a function, of the class of a callable object, or the name of a model."""
    function = unwrap_partial(function)
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _plain(value: Any) -> Any:
    """The value with names of types for what has no text of its own, such as images."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()


def adapter_changes(checkpoint: str, policy: Any) -> Changed:
    """Settings of the active adapter that differ from those in a checkpoint; none where either has no adapter."""
    if not has_adapter(policy):
        return {}
    model = unwrapped(policy)
    name = model.active_adapter
    path = Path(checkpoint, "" if name == "default" else name, "adapter_config.json")
    was, now = json.loads(path.read_text()) if path.is_file() else {}, adapter_config(model, name)
    changes = {}
    for key in sorted(was.keys() & now.keys() - NOT_OF_AN_ADAPTER):
        old, new = (repr(sorted(one, key=str) if isinstance(one, list) else one) for one in (was[key], now[key]))
        if old != new:
            changes[key] = old, new
    return changes


def check_adapter(checkpoint: str, changed: Changed) -> None:
    """Raise ValueError for settings with which the adapter's weights mean something else, or do not fit."""
    refused = [key for key in changed if key not in SELECTING and "dropout" not in key and not key.startswith("init")]
    if refused:
        raise ValueError(
            f"the adapter in {checkpoint!r} was trained with other settings: {_listed(changed, refused)}. Its weights"
            " need those: resume with the `peft_config` that the run began with, or begin a new run."
        )


def _listed(changed: Changed, keys: Iterable[str]) -> str:
    return ", ".join(f"{key}={changed[key][0]} (now {changed[key][1]})" for key in keys)


def check_kind(checkpoint: str, adapter: bool) -> None:
    """Raise ValueError if a checkpoint holds an adapter and the run trains a whole model, or the other way round."""
    wanted, other = ("adapter_model*", "model*.safetensors*") if adapter else ("model*.safetensors*", "adapter_model*")
    held = sorted(path.name for path in Path(checkpoint).rglob(other))
    if held and not any(Path(checkpoint).rglob(wanted)):
        raise ValueError(
            f"the weights in {checkpoint!r} do not fit this model: they are {held[0]}, and this run trains"
            f" {'an adapter' if adapter else 'a whole model'}. Resume with the model that the run began with,"
            f" {'without' if adapter else 'with'} `peft_config`."
        )


def check_same_sizes(checkpoint: str, saved: dict[str, int], current: dict[str, int]) -> None:
    """Raise ValueError for other batch sizes; a size that the checkpoint does not know had its default then."""
    defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(BatchAlgebra)}
    saved = {**{name: defaults[name] for name in current if name in defaults}, **saved}
    changed = [f"{name}={saved.get(name)} (now {value})" for name, value in current.items() if saved.get(name) != value]
    if changed:
        raise ValueError(
            f"{checkpoint!r} was made with {', '.join(changed)}: its buffered completions and its place in the data do"
            f" not fit this run. Resume with the same numbers, or begin a new run from its weights with"
            f" model={checkpoint!r}."
        )


def check_same_sharding(checkpoint: str, saved: str, current: str) -> None:
    if saved == current:
        return
    was, now = (name or "whole weights in each process" for name in (saved, current))
    raise ValueError(
        f"{checkpoint!r} was saved under {was}, and this run has {now}, which keeps its optimizer in another form."
        f" Launch this run as that one was launched, or begin a new run from its weights with model={checkpoint!r}."
    )


def check_same_optimizer(checkpoint: str, saved: dict[str, str], current: dict[str, str]) -> None:
    names = [path.name for path in Path(checkpoint).iterdir()]
    if not any(name.startswith(("optimizer", "global_step")) for name in names):  # no state: the optimizer starts fresh
        return
    for key in ("optim", "lr_scheduler_type"):
        was, now = saved.get(key, current.get(key, "")), current.get(key, "")
        fits = key == "lr_scheduler_type" and was.strip("'") not in FOLLOWING
        if not fits and was.replace("_fused", "") != now.replace("_fused", ""):  # a fused optimizer has the same state
            raise ValueError(
                f"{checkpoint!r} holds the state of {key}={was}, which {key}={now} cannot continue from. Resume with"
                f" {key}={was}, or begin a new run from its weights with model={checkpoint!r}."
            )


def follow_schedule(scheduler: Any) -> None:
    """Set the learning rates of this run's schedule, which may be longer than the checkpoint's, whose last is 0."""
    if not isinstance(scheduler, LambdaLR):
        return
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates: list[Any] = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def check_same_trained(checkpoint: str, saved: Sequence[str], current: Sequence[str], changed: Changed) -> None:
    """Raise ValueError if the names of trained weights differ, as loading ignores a weight that one model lacks."""
    if saved == current:
        return
    others = sorted({*saved} ^ {*current})
    settings = f" The adapter's settings were {_listed(changed, changed)}." if changed else ""
    raise ValueError(
        f"the weights in {checkpoint!r} belong to a different model: {len(others)} trained weights are in only one of"
        f" the two, such as {others[0]}.{settings} Resume with the model that the run began with."
    )


def check_same_frozen(checkpoint: str, saved: Sample | None, current: Sample, adapter: bool) -> None:
    """Raise ValueError for another base than the adapter was trained on, or another reference of the KL penalty."""
    if not saved or not current:  # no weights are frozen, or the reference had moved when it was saved
        return
    names = sorted(saved.keys() | current.keys())
    others = [name for name in names if not _same(saved.get(name), current.get(name))]
    if not others:
        return
    differ = f"{len(others)} of {len(names)} weights differ, or are quantised in another way, such as {others[0]}"
    if adapter:
        raise ValueError(
            f"{checkpoint!r} holds an adapter that was trained on another base model: {differ}. Resume with the base"
            " model that the run began with, or begin a new run that trains the adapter on this one, with"
            f" model=PeftModel.from_pretrained(base, {checkpoint!r}, is_trainable=True)."
        )
    raise ValueError(
        f"{checkpoint!r} is of a run with another reference model for its KL penalty (beta): {differ}. The reference is"
        " the model that a run begins with, so resume with that as `model`. Or begin a new run, whose reference is the"
        f" checkpoint, with model={checkpoint!r}; or set beta=0."
    )


def _same(was: tuple[str, Tensor] | None, now: tuple[str, Tensor] | None) -> bool:
    """True for equal weights: exactly in one dtype, and rounded in another, as machines restore quantised ones."""
    if was is None or now is None or was[1].shape != now[1].shape or (was[0] == QUANTISED) != (now[0] == QUANTISED):
        return False
    if was[0] == now[0] != QUANTISED:
        return torch.equal(was[1], now[1])
    return torch.allclose(was[1], now[1], rtol=5e-3, atol=1e-6)


def warn_of_uncompared(checkpoint: str, policy: Any) -> None:
    method = quantization_method(base_model(policy))
    if has_adapter(policy) and method not in (None, "bitsandbytes"):
        warn(
            f"the weights of the base model, which {method} has quantised, cannot be compared with those that the"
            f" adapter in {checkpoint!r} was trained on: make sure that it is the same model.",
        )
