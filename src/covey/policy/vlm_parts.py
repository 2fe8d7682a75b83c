"""Parts of a vision-language model: image encoder, aligner (projector, connector, merger), language model and head."""

import copy
import re
from collections.abc import Collection
from typing import Any

from torch import nn

from covey.core.model import without_adapter

ALIGNERS = ("merger", "projector", "connector", "aligner", "newline")
"""Substrings of the names of modules and parameters between the image encoder and the language model."""


def image_encoder(model: Any) -> nn.Module | None:
    base = without_adapter(model)
    encoder = base.get_encoder(modality="image") if hasattr(base, "get_encoder") else None
    return encoder if isinstance(encoder, nn.Module) and encoder not in (base, getattr(base, "model", None)) else None


def part_names(model: Any) -> dict[str, str]:
    """Part of each parameter, by name: "vit", "aligner" or "llm"; ValueError without an image encoder."""
    base, encoder = without_adapter(model), image_encoder(model)
    if encoder is None:
        raise ValueError(
            f"{type(base).__name__} has no image encoder that Covey finds, so freeze_vit and freeze_aligner have"
            " no effect. Leave them at False."
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
    """PEFT config without adapters in `frozen` parts, which PEFT would train; ValueError where that cannot be."""
    if not hasattr(peft_config, "exclude_modules"):
        raise ValueError(
            f"{type(peft_config).__name__} cannot exclude parts of a model: leave freeze_vit, freeze_aligner and"
            " freeze_llm at False, or use LoRA."
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
