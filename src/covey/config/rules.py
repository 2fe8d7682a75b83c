"""Rules of a config: each is one function, named after what it guarantees.

A rule yields findings: errors for settings that cannot work, warnings for those without effect. To add one, write it
below the fields of its theme (`training`, `sampling`, `objective`, ...): every public function there is a rule.
"""

import dataclasses
import functools
import inspect
import numbers
import os
import re
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig

from covey.algorithms import ADVANTAGES, LOSS_TYPES
from covey.algorithms.comparison import COMPARISONS, ROLE_AVERAGE, WITHIN
from covey.config import engines, objective, sampling, supervision, teachers, training
from covey.config.aliases import OldNames
from covey.config.choosing import check_gates, check_sampler
from covey.config.fields import LIMITS, Args, Limits
from covey.core.findings import Finding
from covey.runtime.safe_text import is_secret, without_secrets

RULES: tuple[Callable[[Args], Iterator[Finding]], ...] = tuple(
    rule
    for theme in (training, sampling, objective, supervision, teachers, engines)
    for name, rule in vars(theme).items()
    if inspect.isfunction(rule) and rule.__module__ == theme.__name__ and not name.startswith("_")
)
READ_BY_A_RULE = {"pad_to_multiple_of", "reward_clip_range", "reward_weights", "vllm_gpu_memory_utilization"}
ALSO: dict[str, tuple[Any, ...]] = {  # what transformers takes, or makes of a value, beyond the type it declares
    "accelerator_config": (AcceleratorConfig,),
    "debug": (NoneType, list[str]),
    "deepspeed": (Literal[False],),
    "fsdp": (bool, list[str]),
    "hub_token": (bool,),
    "resume_from_checkpoint": (bool,),
}
BACKENDS = Limits(choices=("nccl", "gloo", "mpi", "ucc", "xccl", "ccl", "hccl", "cncl", "mccl"))
DESCRIBED = {bool: "True or False", float: "a number", int: "a whole number", str: "text", dict: "a dict"}


def check_fields(args: Args) -> list[Finding]:
    """Errors of single fields, whatever the others are."""
    if not isinstance(args.output_dir, str | os.PathLike | None):
        return [Finding.error("setting-type", f"output_dir={args.output_dir!r} must be text: the name of a folder.")]
    own = next(kind for kind in type(args).__mro__ if kind.__module__.startswith("covey."))  # not a script's subclass
    hints = _hints(own)
    names = [field.name for field in dataclasses.fields(own) if field.name not in OldNames.__dataclass_fields__]
    return [found for name in names if (found := next(_errors(args, name, hints[name]), None))]


@functools.cache  # reading them takes 5 ms, and a run checks its config more than once
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _errors(args: Args, name: str, hint: Any) -> Iterator[Finding]:
    """Errors of one field; after the first, the others may not hold."""
    value = getattr(args, name, None)
    one_of = get_origin(hint) in (Union, UnionType)
    kinds = (*(get_args(hint) if one_of else [hint]), *ALSO.get(name, ()))
    enum = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), ())
    limits = Limits(choices=tuple(one.value for one in enum)) if enum else LIMITS.get(name)
    if name not in READ_BY_A_RULE and not (limits and limits.choices):
        yield from _check_type(name, value, kinds)
    if limits is not None and not (value is None and NoneType in kinds):
        yield from limits.check(name, value)
    if name in CHECKS:
        yield from CHECKS[name](value)


def _check_optim_args(given: Any) -> Iterator[Finding]:
    if given and isinstance(given, str) and not all("=" in part for part in given.split(",")):
        evidence = f"optim_args={given!r} must be arguments of the optimizer, as in 'a=1,b=2'."
        yield Finding.error("setting-format", evidence)
    yield from _check_finite("optim_args", given)


def _check_finite(name: str, given: Any) -> Iterator[Finding]:  # few optimizers look at what they are given
    if re.search(r"\b(nan|inf)\b", str(given), re.IGNORECASE):
        yield Finding.error("setting-range", f"{name}={given!r} holds NaN or infinity: give a finite number.")


def _check_backend(given: Any) -> Iterator[Finding]:
    for backend in given.split(",") if given is not None else ():  # as in cpu:gloo,cuda:nccl
        if (name := backend.rpartition(":")[2]) not in torch.distributed.Backend.backend_list:  # also registered ones
            yield from BACKENDS.check("ddp_backend", name)


def _check_debug(given: Any) -> Iterator[Finding]:
    for word in given.split() if isinstance(given, str) else given or ():
        yield from Limits(choices=tuple(option.value for option in DebugOption)).check("debug", word)


def _check_loss_type(given: Any) -> Iterator[Finding]:
    advice = (
        "To add your own, call covey.algorithms.register_loss before making the config, or name a file.py:function."
    )
    yield from Limits(choices=tuple(sorted(LOSS_TYPES)), advice=advice).check("loss_type", given)


def _check_advantages(given: Any) -> Iterator[Finding]:
    if given is not None:
        advice = "Your own: covey.algorithms.register_advantages before making the config, or file.py:function."
        yield from Limits(choices=tuple(sorted(ADVANTAGES)), advice=advice).check("advantages", given)


def _check_compare(given: Any) -> Iterator[Finding]:
    if not isinstance(given, dict):
        yield from Limits(choices=COMPARISONS).check("compare", given)
    elif not given or not all(isinstance(role, str) for role in given):
        evidence = f"compare={given!r} must give each role a comparison:"
        yield Finding.error("setting-format", evidence, 'as {"proposer": "role", "solver": "episode"}.')
    else:
        for role, by in given.items():
            yield from Limits(choices=WITHIN).check(f"compare[{role!r}]", by)


CHECKS: dict[str, Callable[[Any], Iterator[Finding]]] = {
    "compare": _check_compare,
    "loss_type": _check_loss_type,
    "advantages": _check_advantages,
    "optim_args": _check_optim_args,
    "prompt_sampler": check_sampler,
    "gates": partial(check_gates, stored=True),
    "lr_scheduler_kwargs": partial(_check_finite, "lr_scheduler_kwargs"),
    "ddp_backend": _check_backend,
    "debug": _check_debug,
}
"""Checks of single fields beyond their type and limits."""


def check_rules(args: Args) -> list[Finding]:
    """Findings of every rule."""
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule(args)
        except Exception:  # a rule may fail on a value that an earlier one refused
            if not any(finding.grave for finding in found):
                raise
    return found


def _check_type(name: str, value: Any, kinds: tuple[Any, ...]) -> Iterator[Finding]:
    if not any(_is_one(value, kind) for kind in kinds):
        allowed = " or ".join(dict.fromkeys(_described(kind) for kind in kinds if kind is not NoneType))
        shown = "..." if is_secret(name) and value is not None else repr(without_secrets(value))
        kind, advice = type(value).__name__, ""
        if isinstance(value, str) and bool in kinds:
            advice = "Write it without quotes: as it is, it would count as True."
        elif isinstance(value, str) and {int, float} & set(kinds):
            advice = "Write it without quotes, such as 1 or 1.0e-6; YAML takes 1e-6 for text."
        evidence = f"{name}={shown} must be {allowed}, but is a{'n' * (kind == 'int')} {kind}."
        if value is None:
            evidence, advice = f"{name}=None must be {allowed}.", "Leave it out for its default."
        yield Finding.error("setting-type", evidence, advice)
    elif value != value:
        evidence = f"{name}=nan is not a number: give a number, or leave the field out for its default."
        yield Finding.error("setting-range", evidence)


def _is_one(value: Any, kind: Any) -> bool:
    """True if a value is of the type of a hint; 0 and 1 count as bools, and whole numbers as floats."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is bool:
        return isinstance(value, numbers.Real | np.bool_) and value in (0, 1)
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list | tuple) and all(_is_one(one, inner[0]) for one in value)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    return not isinstance(origin or kind, type) or isinstance(value, origin or kind)


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list of {DESCRIBED.get(get_args(kind)[0], 'text')}"
    return DESCRIBED.get(get_origin(kind) or kind, f"a {getattr(kind, '__name__', kind)}")


def check_batch_settings(args: Args) -> Iterator[Finding]:
    if args.n_gpu > 1:
        yield Finding.error(
            "gpus-in-one-process",
            f"{args.n_gpu} GPUs are visible to one process.",
            f"Start one process per GPU (accelerate launch --num_processes {args.n_gpu} script.py) or show one only"
            " (CUDA_VISIBLE_DEVICES=0).",
        )
    with_teacher = args.teacher is not None or bool(getattr(args, "other_names", None))  # a trainer may be given it
    fewest = 1 if args.compare == ROLE_AVERAGE or with_teacher else 2
    if args.num_generations is None or args.num_generations < fewest:
        yield Finding.error(
            "group-of-one",
            f"num_generations={args.num_generations!r}: a completion is compared with the others of its prompt, so "
            "there must be at least 2; with 1 every advantage is 0 and nothing is learned.",
            "4 to 16 are usual.",
        )
    if args.auto_find_batch_size:
        yield Finding.error(
            "batch-search",
            "auto_find_batch_size=True would change per_device_train_batch_size, and with it how groups divide, in the "
            "middle of a run.",
            "Set per_device_train_batch_size yourself; `covey explain` estimates the memory.",
        )
    if getattr(args.accelerator_config, "split_batches", False):  # transformers has parsed it
        yield Finding.error(
            "batch-split",
            "accelerator_config with split_batches=True would cut groups apart.",
            "Leave it False: per_device_train_batch_size counts the completions of one process.",
        )
