"""Trained parts of a model: adapters, and the parts of a vision-language model that may be frozen."""

import copy
import json
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from covey.core.findings import CheckError, Finding
from covey.core.model import unwrapped, without_adapter
from covey.policy.quantization import is_quantized_layer, quantization_method

NEED_INPUTS = ("POLY", "XLORA", "CPT")  # PEFT types that need more than tokens in a forward pass, or two forward passes

ALIGNERS = ("merger", "projector", "connector", "aligner", "newline")
"""Substrings by which modules and parameters between the image encoder and the language model are recognised."""


def with_adapter(model: Any, peft_config: Any, frozen: Collection[str] = ()) -> Any:
    """Add a trainable adapter to a model, except to its `frozen` parts ("vit", "aligner", "llm").

    Raises:
        CheckError: the config names modules that the model does not have, or cannot leave out frozen parts.
    """
    from peft import get_peft_model, prepare_model_for_kbit_training

    if quantization_method(model) is not None:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if frozen:
        peft_config = exclude_parts(model, peft_config, frozen)
    try:
        return get_peft_model(model, peft_config)
    except (TypeError, ValueError) as error:
        raise CheckError.of(
            "adapter-type", f"the adapter of `peft_config` does not fit {type(model).__name__}: {error}"
        ) from error


def check_adapter_config(peft_config: Any, model: Any = None) -> Iterator[Finding]:
    """Findings about the config of an adapter and, if `model` is given, about the model that it will be added to.

    Raises:
        ImportError: PEFT is missing.
    """
    if peft_config is None:
        return
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ImportError("`peft_config` needs PEFT: pip install peft") from error
    if isinstance(model, PeftModel):
        yield Finding.error(
            "adapter-type",
            "a PeftModel and a `peft_config` were both given.",
            "Give the base model with the config, or the PeftModel alone.",
        )
    if not isinstance(peft_config, PeftConfig):
        yield Finding.error(
            "adapter-type",
            f"`peft_config` must be a PEFT config, got {type(peft_config).__name__}: {peft_config!r:.80}.",
            "Make one, such as peft.LoraConfig(r=16, target_modules='all-linear').",
        )
        return
    yield from _check_kind(peft_config, "`peft_config`")


def check_adapters(model: Any) -> Iterator[Finding]:
    """Findings about adapters of a model that is no PeftModel, or whose type cannot be trained."""
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        yield Finding.error(
            "adapter-type",
            f"this {type(model).__name__} holds adapters without being a PeftModel, as `model.add_adapter` and PEFT's"
            " mixed models make them.",
            "Give the model without them and a `peft_config`, or make it with peft.get_peft_model.",
        )
        return
    yield from _check_kind(adapters[model.active_adapter], "the adapter of the model")


def _check_kind(config: Any, name: str) -> Iterator[Finding]:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.task_type not in (None, "CAUSAL_LM"):
        yield Finding.error(
            "adapter-type",
            f"{name} has task_type={str(config.task_type)!r}, but the policy is a causal language model.",
            "Use task_type='CAUSAL_LM', or leave it out.",
        )
    unfit = None
    if config.is_prompt_learning:
        unfit = "puts virtual tokens before the prompt; sampling and scoring support adapters inside the layers"
    elif kind in NEED_INPUTS:
        unfit = "needs further inputs next to the tokens, which sampling and scoring do not have"
    if unfit is not None:
        yield Finding.error(
            "adapter-type", f"{name} is a {type(config).__name__}, which {unfit}.", "Use LoRA or one of its variants."
        )
    if kind == "ADALORA":
        yield Finding.warning(
            "adapter-type",
            f"{name} is an AdaLoraConfig: Covey does not call its `update_and_allocate`, so every layer keeps its first"
            f" rank, init_r={config.init_r}.",
            "Call it in a callback's `on_optimizer_step`, or use LoRA.",
        )


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return unwrapped(without_adapter(unwrapped(model)))


def with_shared_weights(model: Any, *, trained: bool = True) -> Any:
    """A copy of a model whose parameters are the same tensors, not copies; `trained=False`: only the frozen ones."""
    same: list[Any] = [weight for weight in model.parameters() if trained or not weight.requires_grad]
    states = (getattr(module, "quant_state", None) for module in model.modules() if is_quantized_layer(module))
    same += [state for state in states if state is not None]
    return copy.deepcopy(model, {id(one): one for one in same})


def has_adapter(model: Any) -> bool:
    return hasattr(unwrapped(model), "get_base_model")


def load_adapters(model: Any, folder: str) -> None:
    """Load a checkpoint's adapters under their names; ValueError if the active adapter is not in the folder.

    PEFT saves the adapter "default" in the folder itself, and others in subfolders named after them.
    """
    for name in model.peft_config:
        place = folder if name == "default" else os.path.join(folder, name)
        if not any(os.path.isfile(os.path.join(place, f"adapter_model.{kind}")) for kind in ("safetensors", "bin")):
            if name in model.active_adapters:
                raise ValueError(
                    f"the checkpoint {folder!r} has no weights of the active adapter {name!r}. Give a checkpoint of the"
                    " same run, or activate an adapter that it has."
                )
            continue
        model.load_adapter(place, name, is_trainable=name in model.active_adapters)


def active_adapter(model: Any) -> str:
    """Name of the one active adapter; CheckError if there is none, or more than one."""
    if not has_adapter(model):
        raise CheckError.of(
            "adapter-alone",
            f"only an adapter can be sent by itself, and {type(model).__name__} has none.",
            "Send the whole model, or train an adapter with `peft_config`.",
        )
    active = list(model.active_adapters)
    if len(active) != 1:
        raise CheckError.of(
            "adapter-alone",
            f"the adapters {active} are in use at once, but a server samples from one at a time.",
            "Merge them (vllm_lora_sync='merged'), or activate one with model.set_adapter(name).",
        )
    return active[0]


def adapter_config(model: Any, name: str) -> dict[str, Any]:
    """Config of an adapter as a dictionary, in the form of `adapter_config.json`."""
    given = {key: value for key, value in model.peft_config[name].to_dict().items() if key != "runtime_config"}
    config: dict[str, Any] = json.loads(json.dumps(given, default=sorted, sort_keys=True))  # sets become lists
    config["inference_mode"] = True
    if config.get("base_model_name_or_path") is None:
        config["base_model_name_or_path"] = getattr(base_model(model).config, "_name_or_path", None) or None
    return config


def why_not_alone(model: Any) -> str | None:
    """Reason why servers cannot load the active adapter, or None if they can.

    They load low-rank matrices of linear layers, with one rank and one scale.
    """
    model = unwrapped(model)
    config = model.peft_config[active_adapter(model)]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"it is of type {kind}"
    for name, why in (
        ("use_dora", "it is a DoRA"),
        ("modules_to_save", "it contains whole modules (modules_to_save)"),
        ("trainable_token_indices", "it contains token embeddings (trainable_token_indices)"),
        ("target_parameters", "it changes parameters outside of linear layers (target_parameters)"),
        ("rank_pattern", "its rank differs between layers (rank_pattern)"),
        ("alpha_pattern", "its scale differs between layers (alpha_pattern)"),
        ("layer_replication", "it repeats layers (layer_replication)"),
        ("lora_bias", "it has biases (lora_bias)"),
    ):
        if getattr(config, name, None):
            return why
    parts = part_names(model) if image_encoder(model) is not None else {}
    if {part for name, part in parts.items() if "lora_" in name} - {"llm"}:
        return "it changes the image encoder, for which servers support none"
    return "it trains biases" if getattr(config, "bias", "none") != "none" else None


def low_rank_matrices(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Active LoRA adapter by the layer's name in the base model: A [rank, in], and scale · B [out, rank]."""
    name = active_adapter(model)
    return {
        path: (layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach() * layer.scaling[name])
        for path, layer in model.get_base_model().named_modules()
        if name in getattr(layer, "lora_A", ())
    }


# ---- image encoder, aligner (projector, connector, merger), language model and head ----------------------------------


def image_encoder(model: Any) -> nn.Module | None:
    base = without_adapter(model)
    encoder = base.get_encoder(modality="image") if hasattr(base, "get_encoder") else None
    return encoder if isinstance(encoder, nn.Module) and encoder not in (base, getattr(base, "model", None)) else None


def part_names(model: Any) -> dict[str, str]:
    """Part of each parameter, by name: "vit", "aligner" or "llm"; CheckError without an image encoder."""
    base, encoder = without_adapter(model), image_encoder(model)
    if encoder is None:
        raise CheckError.of(
            "model-part",
            f"Covey finds no image encoder in {type(base).__name__}, so freeze_vit and freeze_aligner have no effect.",
            "Leave them at False.",
        )
    of_encoder, of_decoder = (
        {id(parameter) for parameter in part.parameters()} for part in (encoder, base.get_decoder())
    )
    of_head = {id(parameter) for parameter in base.get_output_embeddings().parameters()}

    def part(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in of_decoder | of_head:
            return "llm"
        aligns = any(word in name for word in ALIGNERS)
        return "vit" if id(parameter) in of_encoder and not aligns else "aligner"

    return {name: part(name, parameter) for name, parameter in model.named_parameters()}


def freeze_parts(model: Any, frozen: Collection[str]) -> None:
    """Freeze some parts ("vit", "aligner", "llm") of a transformers model; the others stay as they are."""
    parts = part_names(model)
    for name, parameter in model.named_parameters():
        if parts[name] in frozen:
            parameter.requires_grad_(False)


def exclude_parts(model: Any, peft_config: Any, frozen: Collection[str]) -> Any:
    """PEFT config that adds no adapters to `frozen` parts; CheckError if this type of config cannot exclude parts."""
    if not hasattr(peft_config, "exclude_modules"):
        raise CheckError.of(
            "model-part",
            f"{type(peft_config).__name__} cannot exclude parts of a model.",
            "Leave freeze_vit, freeze_aligner and freeze_llm at False, or use LoRA.",
        )
    parts = part_names(model)
    parts_of_module: dict[str, set[str]] = {}
    for name, part in parts.items():
        parts_of_module.setdefault(name.rpartition(".")[0], set()).add(part)
    excluded = sorted(module for module, of_module in parts_of_module.items() if of_module <= set(frozen))
    given, changed = peft_config.exclude_modules or [], copy.copy(peft_config)
    if isinstance(given, str):
        changed.exclude_modules = "|".join([f"(?:{given})", *map(re.escape, excluded)])
    else:
        changed.exclude_modules = [*given, *excluded]
    return changed
