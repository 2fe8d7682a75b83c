"""The parts of a vision-language model, and freezing some of them.

Families call their parts differently: what encodes images (`vision_tower`, `visual`, `vision_model`), what brings its
output into the language model's space (a projector, connector or merger, which Qwen keeps inside the encoder), and the
language model with its head. Not here: adapters, which are frozen with the part that they lie in.
"""

from typing import Any

from torch import nn

ALIGNERS = ("merger", "projector", "connector", "aligner", "newline")
"""What the names of modules and parameters hold that stand between the encoder of images and the language model."""


def part_names(model: Any) -> dict[str, str]:
    """Which part each parameter belongs to, by name: "vit", "aligner" or "llm".

    Args:
        model: a transformers or PEFT model.

    Raises:
        ValueError: it has no encoder of images.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    encoder, decoder = base.get_encoder(modality="image"), base.get_decoder()
    if encoder in (base, getattr(base, "model", None)) or not isinstance(encoder, nn.Module):
        raise ValueError(
            f"{type(base).__name__} has no encoder of images that could be found, so freeze_vit and freeze_aligner mean"
            " nothing. Leave them at False."
        )
    of_encoder, of_decoder = ({id(one) for one in part.parameters()} for part in (encoder, decoder))
    of_head = {id(one) for one in base.get_output_embeddings().parameters()}

    def part(name: str, parameter: nn.Parameter) -> str:
        if id(parameter) in of_decoder | of_head:
            return "llm"
        aligns = any(word in piece for piece in name.split(".") for word in ALIGNERS)
        return "vit" if id(parameter) in of_encoder and not aligns else "aligner"

    return {name: part(name, parameter) for name, parameter in model.named_parameters()}


def freeze_parts(model: Any, *, vit: bool, aligner: bool, llm: bool) -> None:
    """Let some parts keep their weights, those of adapters in them included; the others stay as they are.

    Raises:
        ValueError: the model has no encoder of images.
    """
    frozen = {name for name, chosen in (("vit", vit), ("aligner", aligner), ("llm", llm)) if chosen}
    if not frozen:
        return
    parts = part_names(model)
    for name, parameter in model.named_parameters():
        if parts[name] in frozen:
            parameter.requires_grad_(False)
