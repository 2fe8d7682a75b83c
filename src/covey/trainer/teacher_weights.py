"""Weights of teachers in memory, before any is loaded: of models that are loaded, or that are shared.

The rules are those by which `covey.trainer.build` loads them.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import BitsAndBytesConfig

from covey.config.base import OnlineConfig
from covey.config.teacher_sources import is_loaded
from covey.policy.adapters import active_adapter, base_model, has_adapter
from covey.policy.loading import as_dtype, config_of_source
from covey.policy.stored_adapters import StoredAdapter, changes_base, stored_adapter
from covey.sizing.memory import weight_bytes
from covey.sizing.model_spec import count_parameters
from covey.trainer.build import shares_base, teacher_kwargs


class TeacherWeights(NamedTuple):
    """Weights that a teacher needs in a process."""

    said: str  # for people
    loaded: str | None = None  # folder or hub id of a whole model that is loaded for it; None: it shares one


@dataclass(frozen=True)
class PolicyWeights:
    """Facts about the policy that decide whether teachers share its weights."""

    config: Any  # of its base model; None: unknown
    peft: Mapping[str, Any] | None  # settings of its adapter; None: all weights are trained
    in_eight_bits: bool = False
    shards: int = 1  # processes over which weights are sharded

    @classmethod
    def of(cls, policy: Any, shards: int) -> "PolicyWeights":
        """Of a loaded policy, whose weights are sharded over so many processes."""
        config = base_model(policy).config
        quantization: Any = getattr(config, "quantization_config", None)
        in_eight_bits = bool(getattr(quantization, "load_in_8bit", False))
        peft = policy.peft_config[active_adapter(policy)].to_dict() if has_adapter(policy) else None
        return cls(config, peft, in_eight_bits, shards)


OFFLINE: dict[str, Any] = {"local_files_only": True}


def weights_of_teachers(
    args: OnlineConfig, policy: PolicyWeights, place: Mapping[str, Any] = OFFLINE
) -> Iterator[TeacherWeights]:
    """Weights of each teacher that is named and is a model of its own, in the order in which they are loaded.

    `place` are further arguments of `from_pretrained`, by default to look at this machine alone. A teacher that is not
    found there is taken for a whole model.
    """
    bases: set[tuple[str, str | None]] = set()  # loaded for an earlier teacher
    for source in filter(is_loaded, args.teachers.values()):
        adapter = None
        with suppress(OSError):
            adapter = stored_adapter(source, {**teacher_kwargs(args), **place})
        if adapter is None:
            yield TeacherWeights(f"the weights of {source}", source)
            continue
        said, base = f"the adapter {source}", (adapter.base, adapter.revision)
        if adapter.changes_weights:
            yield TeacherWeights(f"{said} and its own base {adapter.base}, whose weights it changes", adapter.base)
        elif policy.shards > 1:
            yield TeacherWeights(f"{said} and its own base {adapter.base}, since weights are sharded", adapter.base)
        elif base in bases:
            yield TeacherWeights(f"{said} on the base {adapter.base}, which an earlier teacher has loaded")
        elif (reason := _why_apart(args, policy, adapter)) is None:
            yield TeacherWeights(f"{said}, whose base is the policy's")
        else:
            bases.add(base)
            yield TeacherWeights(f"{said} and its base {adapter.base}{reason}", adapter.base)


def _why_apart(args: OnlineConfig, policy: PolicyWeights, adapter: StoredAdapter) -> str | None:
    """The reason that a teacher's adapter does not share the policy's base, to end a sentence; None: it shares it."""
    if policy.peft is None or not shares_base(args, adapter, policy.config):
        return ""
    if changes_base(policy.peft):
        return ", since the policy's adapter changes the policy's own"
    return ", since a base in 8 bits is not shared" if policy.in_eight_bits else None


def teacher_bytes(
    args: OnlineConfig, policy: PolicyWeights, given: Any = None, place: Mapping[str, Any] = OFFLINE
) -> int:
    """Bytes in one process of the whole models that are loaded for teachers, or of the model that was `given`.

    Models whose config is not found count 0.
    """
    if given is not None:
        return sum(weight.numel() * weight.element_size() for weight in given.parameters()) // policy.shards
    kwargs = teacher_kwargs(args)
    names = [one.loaded for one in weights_of_teachers(args, policy, place) if one.loaded is not None]
    configs = [config_of_source(name, {**kwargs, **place}) for name in names]
    return sum(_bytes_of(config, kwargs) for config in configs if config is not None) // policy.shards


def planned_teacher_bytes(args: OnlineConfig, policy: Any, shards: int, given: Any = None) -> int:
    """`teacher_bytes` for a loaded policy; 0 for models that the formulas do not know."""
    with suppress(AttributeError, TypeError, ValueError):  # what cannot work is refused where it is loaded
        return teacher_bytes(args, PolicyWeights.of(policy, shards), given, place={})
    return 0


def _bytes_of(config: Any, kwargs: Mapping[str, Any]) -> int:
    quantization = kwargs.get("quantization_config")
    if isinstance(quantization, dict):
        quantization = BitsAndBytesConfig(**quantization)
    counts = count_parameters(config, None, quantization if hasattr(quantization, "load_in_8bit") else None)
    dtype = as_dtype(kwargs.get("torch_dtype") or kwargs.get("dtype"))
    if not isinstance(dtype, torch.dtype):  # "auto"
        dtype = getattr(config, "dtype", None) or torch.float32
    return weight_bytes(counts, dtype.itemsize)
