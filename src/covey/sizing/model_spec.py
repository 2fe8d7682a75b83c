"""A model on paper: what it consists of, from its config alone.

It is built on PyTorch's meta device, which holds shapes but no numbers, with its adapter, its frozen parts and the
weights that would be quantised. Not here: what a run makes of it (`covey.sizing.memory`).
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from covey.policy.loading import sees_images
from covey.policy.vlm_parts import freeze_parts, outside_of, part_names

PACKED_ROWS = (512, 128)
"""MKL's packed copy of a weight [n, k] takes (n rounded up to a multiple of the first + the second) * k numbers; read
off the copies that it makes."""

BLOCK, NESTED_BLOCK = 64, 256
"""Numbers of a 4-bit weight that share a scale, and scales that share one where these are quantised again."""


class SavedActivations(NamedTuple):
    """Which inputs of a decoder layer's linear layers the backward pass needs: of those with weights to train.

    Attributes:
        norms: the layer's norms are trained.
        wide: norms of the hidden size.
        heads: queries and keys have norms of their own.
        attention: linear layers that read the first norm (q, k, v).
        mlp: linear layers that read the second.
        down: the MLP's last linear layer keeps its input.
        ranks: channels between the halves of adapters, of all in a layer.
        passing: channels of products that nobody keeps: queries and keys before they are turned, what is added to
            something else, as are all products under adapters.
    """

    norms: bool = True
    wide: int = 2
    heads: bool = False
    attention: int = 3
    mlp: int = 2
    down: bool = True
    ranks: int = 0
    passing: int = 0


class VisionEncoderSpec(NamedTuple):
    """What encodes images.

    Attributes:
        layers: blocks.
        channels: numbers per patch that attention and MLP of a block keep; 0 where no gradient goes into the encoder.
        hidden: channels between blocks.
        readers: linear layers of a block that read a norm.
        passing: channels of products that nobody keeps.
        merger: numbers that the aligner keeps for each token of an image, where it is the encoder's last part.
        aligner: the same where it follows the encoder.
        weights: numbers in all of it.
        packed: those of MKL's packed copies of its linear layers.
    """

    layers: int
    channels: int
    hidden: int
    readers: int
    passing: int
    merger: int
    aligner: int
    weights: int
    packed: int


class Quantised(NamedTuple):
    """Weights in fewer bits.

    Attributes:
        numbers: that they stand for.
        size: bytes that they and their scales take.
        largest: numbers of the largest, which is unpacked to be multiplied with.
    """

    numbers: int = 0
    size: int = 0
    largest: int = 0


class ModelSpec(NamedTuple):
    """Numbers in a model.

    Attributes:
        parameters: all.
        trainable: those that are updated.
        packed: those of MKL's packed copies of its linear layers.
        quantised: what is held in fewer bits.
        kept: what a layer's backward pass needs; None: as where all weights are trained, or all have adapters.
        embeddings: trained parameters of vocabulary x hidden size; None: one where all weights are trained.
        head: the output head is one of them.
        tower: what encodes images.
    """

    parameters: int
    trainable: int
    packed: int
    quantised: Quantised = Quantised()
    kept: SavedActivations | None = None
    embeddings: int | None = None
    head: bool = True
    tower: VisionEncoderSpec | None = None


class FsdpUnits(NamedTuple):
    """Parameters that are gathered together: those outside of the layers, and those of the largest layer."""

    outer: int
    layer: int


def count_parameters(
    config: Any, peft: dict[str, Any] | None = None, quantization: Any = None, frozen: Collection[str] = ()
) -> ModelSpec:
    """What a language model consists of, vision-language or not; exact.

    Args:
        config: of transformers.
        peft: arguments of `peft.LoraConfig`, where an adapter is trained.
        quantization: a `BitsAndBytesConfig`, where the weights under it are held in fewer bits.
        frozen: parts that keep their weights: "vit", "aligner", "llm".

    Raises:
        ValueError: transformers has no language model for this config, or the adapter does not fit it.
    """
    model = shapes_of(config)
    quantised = dict(_quantised_layers(model, quantization)) if quantization is not None else {}
    if frozen:
        freeze_parts(model, frozen)
    base = model
    if peft is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            settings = LoraConfig(**{"task_type": "CAUSAL_LM", **peft})
            model = get_peft_model(model, outside_of(model, settings, frozen) if frozen else settings)
    tower = _tower(model, base) if sees_images(config) else None
    encoder = {id(m) for m in base.get_encoder(modality="image").modules()} if tower is not None else set()
    linear = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in quantised and id(m) not in encoder]
    text = config.get_text_config()
    head = {id(p) for p in base.get_output_embeddings().parameters()}
    vocabulary = (text.vocab_size, text.hidden_size)
    embeddings = [id(p) in head for p in model.parameters() if tuple(p.shape) == vocabulary and p.requires_grad]
    return ModelSpec(
        model.num_parameters(),
        model.num_parameters(only_trainable=True),
        _packed(linear),
        Quantised(
            sum(layer.weight.numel() for layer in quantised.values()),
            sum(_size(layer, quantization) for layer in quantised.values()),
            max((layer.weight.numel() for layer in quantised.values()), default=0),
        ),
        _kept(base, text, in_int8=bool(quantised) and quantization.load_in_8bit),
        len(embeddings),
        any(embeddings),
        tower,
    )


def unit_parameters(config: Any) -> FsdpUnits:
    """What FSDP2 wraps: each decoder layer, and around them embedding, last norm and head."""
    model = shapes_of(config)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m).__name__ in kinds]
    return FsdpUnits(model.num_parameters() - sum(layers), max(layers, default=0))


def shapes_of(config: Any) -> Any:
    """The language model of a config, without numbers.

    Raises:
        ValueError: transformers has none for it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def _packed(layers: list[nn.Linear]) -> int:
    """Numbers of MKL's packed copies."""
    step, more = PACKED_ROWS
    return sum((-(-one.out_features // step) * step + more) * one.in_features for one in layers)


# ---- weights in fewer bits ------------------------------------------------------------------------------------------


def _quantised_layers(model: Any, quantization: Any) -> Iterator[tuple[int, nn.Linear]]:
    """The linear layers that transformers would quantise, by identity: all but the head, tied ones and named ones."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left = HfQuantizer.get_modules_to_not_convert(
        model, quantization.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, left):
            yield id(module), module


def _size(layer: nn.Linear, quantization: Any) -> int:
    """Bytes of a layer's weight in 8 bits with a scale for each output, or in 4 bits with scales of blocks."""
    numbers = layer.weight.numel()
    if quantization.load_in_8bit:
        return numbers + 4 * layer.out_features
    scales = -(-numbers // BLOCK)
    nested = quantization.bnb_4bit_use_double_quant
    return numbers // 2 + (scales + 4 * -(-scales // NESTED_BLOCK) if nested else 4 * scales)


# ---- what backward passes need --------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A linear layer in a block, with its adapter if it has one."""

    name: str
    attends: bool
    inputs: int
    outputs: int
    trained: bool
    adapted: bool


def _linear_layers(block: nn.Module) -> list[_Layer]:
    """In the order of the block, an adapter's own layers aside."""
    found: list[_Layer] = []
    inside: set[int] = set()
    for name, module in block.named_modules():
        linear: Any = getattr(module, "base_layer", module)
        if isinstance(linear, nn.Linear) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            trained = any(p.requires_grad for p in module.parameters())
            attends, adapted = "attn" in name or "attention" in name, linear is not module
            found.append(_Layer(name, attends, linear.in_features, linear.out_features, trained, adapted))
    return found


def _blocks(part: nn.Module) -> list[nn.Module]:
    """Its layers: the outermost list, and the first of several."""
    return list(next((module for module in part.modules() if isinstance(module, nn.ModuleList)), ()))


def _kept(base: Any, text: Any, in_int8: bool) -> SavedActivations | None:
    blocks = _blocks(base.get_decoder())
    block = blocks[-1] if blocks else nn.Identity()
    linear = _linear_layers(block)
    if len(blocks) != text.num_hidden_layers or not linear:
        return None
    reading = [one for one in linear if one.inputs == text.hidden_size and one.outputs != text.hidden_size]
    attending = [one for one in linear if one.attends and one.inputs == text.hidden_size]
    attending = attending[:-1] if attending and attending[-1].outputs == text.hidden_size else attending
    fused = any(p.dim() == 3 and p.requires_grad for p in block.parameters())  # experts
    mlp = [one for one in reading if not one.attends]
    ranks = sum(p.shape[0] for name, p in block.named_parameters() if "lora_A" in name)
    norms = {name: p for name, p in block.named_parameters() if p.dim() == 1 and name.endswith("weight")}
    return SavedActivations(
        norms=any(p.requires_grad for p in norms.values()),
        wide=sum(len(p) == text.hidden_size and "attn." not in name for name, p in norms.items()),
        heads=any("q_norm" in name for name in norms),
        attention=3 if in_int8 else sum(one.trained for one in attending),
        mlp=2 if in_int8 or fused else sum(one.trained for one in mlp),
        down=in_int8 or fused or any(one.trained for one in linear if not one.attends and one not in reading),
        ranks=ranks,
        passing=sum(
            one.outputs
            for one in linear
            if one.adapted or one.outputs == text.hidden_size or one.name.endswith(("q_proj", "k_proj"))
        ),
    )


def _tower(model: Any, base: Any) -> VisionEncoderSpec:
    """What is in the encoder, and in what follows it.

    Attention keeps queries, keys, values and its result, the MLP what is before and after its nonlinearity: twice
    before with a gate, and their product.
    """
    parts, named = part_names(model), dict(model.named_parameters())
    trained = {part for name, part in parts.items() if named[name].requires_grad}
    encoder = base.get_encoder(modality="image")
    blocks = _blocks(encoder)
    linear = _linear_layers(blocks[0])
    hidden = linear[0].inputs
    attending, others = [one for one in linear if one.attends], [one for one in linear if not one.attends]
    # Beside one product that all come from: turned queries and keys, and the results of images put together.
    apart = 3 * hidden * (len(attending) == 2)
    mlp = (4 if len(others) > 2 else 2) * others[-1].inputs
    aligning = {id(named[name]) for name, part in parts.items() if part == "aligner"}
    inside = set(encoder.modules())

    def kept(within: bool) -> int:
        linear = (m for m in base.modules() if isinstance(m, nn.Linear) and id(m.weight) in aligning)
        kept = sum(one.in_features + one.out_features for one in linear if (one in inside) == within)
        return kept if trained - {"llm"} else 0

    return VisionEncoderSpec(
        layers=len(blocks),
        channels=sum(one.outputs for one in attending) + apart + mlp if "vit" in trained else 0,
        hidden=hidden,
        readers=len(linear) - 2,
        passing=sum(one.outputs for one in linear) if linear[0].adapted else 2 * hidden,
        merger=kept(within=True),
        aligner=kept(within=False),
        weights=sum(named[name].numel() for name, part in parts.items() if part != "llm"),
        packed=_packed([m for m in encoder.modules() if type(m) is nn.Linear]),
    )
