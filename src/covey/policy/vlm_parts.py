"""The parts of a vision-language model, and freezing some of them.

Families call their parts differently: what encodes images (`vision_tower`, `visual`, `vision_model`), what brings its
output into the language model's space (a projector, connector or merger, which Qwen keeps inside the encoder), and the
language model with its head. Not here: what an adapter is.
"""

import copy
import re
from collections.abc import Collection
from typing import Any

from torch import nn

ALIGNERS = ("merger", "projector", "connector", "aligner", "newline")
"""What the names of modules and parameters hold that stand between the encoder of images and the language model."""


def image_encoder(model: Any) -> nn.Module | None:
    """What encodes the images of a transformers or PEFT model; None where there is nothing of the kind."""
    base = _base(model)
    encoder = base.get_encoder(modality="image") if hasattr(base, "get_encoder") else None
    return encoder if isinstance(encoder, nn.Module) and encoder not in (base, getattr(base, "model", None)) else None


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def part_names(model: Any) -> dict[str, str]:
    """Which part each parameter belongs to, by name: "vit", "aligner" or "llm".

    Args:
        model: a transformers or PEFT model.

    Raises:
        ValueError: it has no encoder of images.
    """
    base, encoder = _base(model), image_encoder(model)
    if encoder is None:
        raise ValueError(
            f"{type(base).__name__} has no encoder of images that could be found, so freeze_vit and freeze_aligner mean"
            " nothing. Leave them at False."
        )
    of_encoder, of_decoder = ({id(one) for one in part.parameters()} for part in (encoder, base.get_decoder()))
    of_head = {id(one) for one in base.get_output_embeddings().parameters()}

    def part(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in of_decoder | of_head:
            return "llm"
        aligns = any(word in piece for piece in name.split(".") for word in ALIGNERS)
        return "vit" if id(parameter) in of_encoder and not aligns else "aligner"

    return {name: part(name, parameter) for name, parameter in model.named_parameters()}


def adapted_parts(model: Any) -> set[str]:
    """The parts of a PEFT model that low-rank matrices lie in.

    Raises:
        ValueError: it has no encoder of images.
    """
    return {part for name, part in part_names(model).items() if "lora_" in name}


def freeze_parts(model: Any, frozen: Collection[str]) -> None:
    """Let some parts keep their weights; the others stay as they are.

    Args:
        model: a transformers model.
        frozen: of "vit", "aligner" and "llm".

    Raises:
        ValueError: the model has no encoder of images.
    """
    parts = part_names(model)
    for name, parameter in model.named_parameters():
        if parts[name] in frozen:
            parameter.requires_grad_(False)


def outside_of(model: Any, peft_config: Any, frozen: Collection[str]) -> Any:
    """A PEFT config that puts no adapter into some parts of a model. (PEFT would train one that was only frozen.)

    Args:
        model: a transformers model.
        peft_config: what is asked for.
        frozen: of "vit", "aligner" and "llm".

    Raises:
        ValueError: this kind of adapter cannot be kept out of modules.
    """
    if not hasattr(peft_config, "exclude_modules"):
        raise ValueError(
            f"{type(peft_config).__name__} cannot be kept out of parts of a model: leave freeze_vit, freeze_aligner and"
            " freeze_llm at False, or use LoRA."
        )
    parts = part_names(model)
    modules = {name.rpartition(".")[0] for name in parts}
    kept_out = sorted(
        module
        for module in modules
        if {parts[name] for name in parts if name.rpartition(".")[0] == module} <= set(frozen)
    )
    given = peft_config.exclude_modules or []
    if isinstance(given, str):
        pattern = "|".join([f"(?:{given})", *map(re.escape, kept_out)])
        return _copy_with(peft_config, exclude_modules=pattern)
    return _copy_with(peft_config, exclude_modules=[*given, *kept_out])


def _copy_with(peft_config: Any, **changes: Any) -> Any:
    changed = copy.copy(peft_config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
