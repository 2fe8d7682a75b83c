"""PEFT adapters in a folder or on the hub, loaded over a base model that other models may share."""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import find_adapter_config_file

from covey.core.findings import CheckError
from covey.core.model import unwrapped
from covey.policy.adapters import NEED_INPUTS, has_adapter, with_shared_weights
from covey.policy.loading import located
from covey.policy.quantization import is_quantized_layer

PROMPT_LEARNING = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT")
"""PEFT types that put virtual tokens before the prompt."""
PLACES = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
LEAVES_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which PEFT leaves the weights of the base as they are. With others (PiSSA, OLoRA,
LoftQ, CorDA, ...) it changes them, also when the adapter is loaded."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter, as described by its `adapter_config.json`."""

    name: str  # its folder or hub id
    base: str  # folder or hub id of the model that it changes
    revision: str | None = None  # revision of the base model
    changes_weights: bool = False  # loading it changes weights of the base model, which then cannot be shared

    def changes(self, name: str, revision: str | None) -> bool:
        """True if its base model is the folder or hub id `name` at `revision`."""
        base, other = os.path.expanduser(self.base), os.path.expanduser(name)
        if os.path.isdir(base) and os.path.isdir(other):
            return os.path.samefile(base, other)
        return base == other and (self.revision or "main") == (revision or "main")


def stored_adapter(name: str, location: dict[str, Any]) -> StoredAdapter | None:
    """The adapter in a folder or of a hub id; None if there is a whole model, or nothing can be found.

    `location` are the arguments of `from_pretrained` that say where it is (revision, cache, token). CheckError for an
    adapter that cannot be a teacher: without a base model, or of a type that needs more than tokens.
    """
    name, path = os.path.expanduser(name), None
    places = {key: value for key, value in located(name, location).items() if key in PLACES}
    with suppress(OSError, ValueError):
        path = find_adapter_config_file(name, **places)
    if path is None:
        return None
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    base, kind = config.get("base_model_name_or_path"), config.get("peft_type")
    if not base:
        raise CheckError.of(
            "teacher-adapter",
            f"teacher={name!r} is an adapter whose adapter_config.json names no base_model_name_or_path.",
            "Write the folder or hub id of its base model there.",
        )
    if kind in (*PROMPT_LEARNING, *NEED_INPUTS):
        raise CheckError.of(
            "teacher-adapter",
            f"teacher={name!r} is an adapter of type {kind}, which needs further inputs next to the tokens.",
            "Use LoRA or one of its variants, or the folder of the merged model.",
        )
    return StoredAdapter(name, str(base), config.get("revision"), changes_base(config))


def changes_base(config: Mapping[str, Any]) -> bool:
    """True if an adapter with these settings of PEFT changes weights of its base: when it is loaded, or trained."""
    return config.get("init_lora_weights", True) not in LEAVES_BASE or config.get("bias", "none") != "none"


def shared_base(policy: Any) -> Any:
    """The base model of a policy's adapter, as a separate model that shares its weights.

    None where this is not possible: there is no adapter, weights of the base are trained, or they are held in 8 bits.
    """
    policy = unwrapped(policy)
    quantized = [module for module in policy.modules() if is_quantized_layer(module)]
    in_eight_bits = any(type(layer._parameters.get("weight")).__name__ == "Int8Params" for layer in quantized)
    if not has_adapter(policy) or not hasattr(policy.base_model, "unload") or in_eight_bits:
        return None
    base = with_shared_weights(policy, trained=False).unload()
    return None if any(weight.requires_grad for weight in base.parameters()) else base.eval()


def has_weights_of(base: Any, other: Any) -> bool:
    """True if two models, unquantised or quantised alike, have the same weights bit by bit.

    Those of `other` are rounded to the dtypes of `base`, which may have been loaded in fewer bits.
    """
    ours, theirs = base.state_dict(), other.state_dict()
    if ours.keys() != theirs.keys():
        return False
    pairs = ((ours[name].cpu(), theirs[name].cpu()) for name in ours)
    floating = ((own, one.to(own.dtype) if own.is_floating_point() else one) for own, one in pairs)
    return all(own.dtype == one.dtype and torch.equal(own, one) for own, one in floating)


def with_stored_adapter(base: Any, adapter: StoredAdapter, location: dict[str, Any]) -> Any:
    """A base model with a frozen adapter; CheckError if the adapter belongs to another model."""
    from peft import PeftModel

    places = {key: value for key, value in located(adapter.name, location).items() if key in PLACES}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, adapter.name, is_trainable=False, **places)
        missing = [str(one.message) for one in caught if "missing adapter keys" in str(one.message)]
    except (ValueError, RuntimeError, KeyError) as error:
        missing = [str(error).strip().partition("\n")[0]]
    if missing:
        raise CheckError.of(
            "teacher-adapter",
            f"teacher={adapter.name!r} does not fit its base model {adapter.base!r}: {missing[0][:300]}",
            "Name the model that it was trained on in its adapter_config.json.",
        )
    return model.requires_grad_(False).eval()
