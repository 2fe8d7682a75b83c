"""Adapters in a folder or on the hub (PEFT), over a base model whose weights other models may share."""

import copy
import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import find_adapter_config_file

from covey.core.findings import CheckError
from covey.core.model import unwrapped
from covey.policy.adapters import NEED_INPUTS, has_adapter
from covey.policy.loading import located
from covey.policy.quantization import is_quantized_layer

PROMPT_LEARNING = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT")
"""PEFT types that put virtual tokens before the prompt."""
PLACES = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as its `adapter_config.json` describes it."""

    name: str  # its folder or hub id
    base: str  # folder or hub id of the model that it changes
    revision: str | None = None  # of that model

    def changes(self, name: str, revision: str | None) -> bool:
        """True if the model that it changes is the one of this folder or hub id."""
        base, other = os.path.expanduser(self.base), os.path.expanduser(name)
        if os.path.isdir(base) and os.path.isdir(other):
            return os.path.samefile(base, other)
        return base == other and (self.revision or "main") == (revision or "main")


def stored_adapter(name: str, location: dict[str, Any]) -> StoredAdapter | None:
    """The adapter in a folder or of a hub id; None where it is a model, or cannot be found.

    `location` are those arguments of `from_pretrained` that say where it is. CheckError for one that no model can use
    as a teacher.
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
            f"teacher={name!r} is an adapter of type {kind}, which needs more than the tokens that are scored.",
            "Use LoRA or one of its relatives, or the folder of the merged model.",
        )
    return StoredAdapter(name, str(base), config.get("revision"))


def shared_base(policy: Any) -> Any:
    """The model under a policy's adapter as a model of its own, over the very same weights.

    None where that cannot be: there is no adapter, weights under it are trained, or the library that packed them keeps
    them in one module.
    """
    policy = unwrapped(policy)
    quantized = [module for module in policy.modules() if is_quantized_layer(module)]
    in_eight_bits = any(type(layer._parameters.get("weight")).__name__ == "Int8Params" for layer in quantized)
    if not has_adapter(policy) or not hasattr(policy.base_model, "unload") or in_eight_bits:
        return None
    same: list[Any] = [weight for weight in policy.parameters() if not weight.requires_grad]
    same += [layer.quant_state for layer in quantized if getattr(layer, "quant_state", None) is not None]
    base = copy.deepcopy(policy, {id(one): one for one in same}).unload()
    return None if any(weight.requires_grad for weight in base.parameters()) else base.eval()


def with_stored_adapter(base: Any, adapter: StoredAdapter, location: dict[str, Any]) -> Any:
    """A base model with an adapter, frozen; CheckError where the adapter is another model's."""
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
            f"teacher={adapter.name!r} does not fit the model that it names, {adapter.base!r}: {missing[0][:300]}",
            "Name the model that it was trained on in its adapter_config.json.",
        )
    return model.requires_grad_(False).eval()
