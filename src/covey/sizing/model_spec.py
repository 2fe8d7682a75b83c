"""Sizes of a model from its config, built on the meta device: parameters, widths, and numbers saved for backward."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from covey.engines.native.packed_weights import packs_for_onednn
from covey.policy.adapters import exclude_parts, freeze_parts, part_names
from covey.policy.loading import auto_class_of, sees_images, whole_models

PACKED_ROWS = (512, 128)
"""(multiple, extra): as measured, MKL's packed copy of a weight [n, k] takes (n rounded up to `multiple` + `extra`) · k
numbers. oneDNN's copy takes n · k."""

BLOCK, NESTED_BLOCK = 64, 256
"""Numbers of a 4-bit weight that share a scale, and scales that share a scale if scales are quantised as well."""


class SavedActivations(NamedTuple):
    """Inputs in a decoder layer that the backward pass needs, because the layers reading them have trained weights."""

    norms: bool = True  # the layer's norms are trained
    wide: int = 2  # number of norms of the hidden size
    heads: bool = False  # queries and keys have norms of their own
    attention: int = 3  # linear layers that read the first norm (q, k, v)
    mlp: int = 2  # linear layers that read the second
    down: bool = True  # the MLP's last linear layer saves its input
    ranks: int = 0  # sum of the ranks of all adapters in a layer
    passing: int = (
        0  # channels of products that are not saved: q and k before rotation, summands, products under adapters
    )


class VisionEncoderSpec(NamedTuple):
    layers: int = 0  # blocks
    channels: int = 0  # numbers per patch that attention and MLP of a block save; 0 where no gradient enters it
    hidden: int = 0  # channels between blocks
    readers: int = 0  # linear layers of a block that read a norm
    passing: int = 0  # channels of products that are not saved
    merger: int = 0  # numbers that the aligner saves for each token of an image, where it is the encoder's last part
    aligner: int = 0  # the same if the aligner follows the encoder
    packed: int = 0  # numbers of the packed copies of its linear layers


class QuantisedWeights(NamedTuple):
    """Sizes of quantised weights."""

    numbers: int = 0
    size: int = 0  # bytes, with scales
    largest: int = 0  # weights in the largest matrix, which is unpacked when it is used


class ModelSpec(NamedTuple):
    parameters: int
    trainable: int  # parameters that are trained
    packed: int  # numbers of the packed copies of its linear layers on this machine's CPU
    quantised: QuantisedWeights = QuantisedWeights()
    saved: SavedActivations | None = None  # None: assume that all weights are trained, or all have adapters
    embeddings: int | None = None  # trained matrices of vocabulary x hidden size; None: one if all weights are trained
    head: bool = True  # the output head is trained
    vision: VisionEncoderSpec = VisionEncoderSpec()  # the default: the model sees no images


class DecoderWidths(NamedTuple):
    """Channels per token in a Llama-like decoder: in all query heads, in all key heads, and in the MLP.

    In a mixture of experts, `inner` is the sum over the `experts` that a token uses.
    """

    queries: int
    keys: int
    inner: int
    experts: int

    @classmethod
    def of(cls, text: Any) -> "DecoderWidths":
        heads = text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        experts = getattr(text, "num_experts_per_tok", None) or 1
        inner = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
        inner = experts * (inner or getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(heads * head_size, key_heads * head_size, inner, experts)


def count_parameters(
    config: Any, peft: dict[str, Any] | None = None, quantization: Any = None, frozen: Collection[str] = ()
) -> ModelSpec:
    """Exact counts of a language model with adapter, quantised weights and frozen parts ("vit", "aligner", "llm")."""
    base = model = meta_model(config)
    quantised = list(_quantised_layers(model, quantization)) if quantization is not None else []
    if frozen:
        freeze_parts(model, frozen)
    if peft is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            settings = LoraConfig(**{"task_type": "CAUSAL_LM", **peft})
            model = get_peft_model(model, exclude_parts(model, settings, frozen) if frozen else settings)
    spec = spec_of(model, base, quantised, in_int8=bool(quantised) and quantization.load_in_8bit)
    numbers = [layer.weight.numel() for layer in quantised]
    sizes = [_quantised_bytes(layer, quantization) for layer in quantised]
    return spec._replace(quantised=QuantisedWeights(sum(numbers), sum(sizes), max(numbers, default=0)))


def spec_of(model: Any, base: Any, quantised: Collection[nn.Module] = (), in_int8: bool = False) -> ModelSpec:
    """Exact counts of a model as it is, without its `quantised` layers; `base` is the model without adapter."""
    config, apart = base.config, set(quantised)
    vision = _vision_encoder(model, base) if sees_images(config) else VisionEncoderSpec()
    encoder = set(base.get_encoder(modality="image").modules()) if sees_images(config) else set()
    linear = [m for m in model.modules() if type(m) is nn.Linear and m not in apart and m not in encoder]
    text = config.get_text_config()
    head = {id(p) for p in base.get_output_embeddings().parameters()}
    vocabulary = (text.vocab_size, text.hidden_size)
    embeddings = [id(p) in head for p in model.parameters() if tuple(p.shape) == vocabulary and p.requires_grad]
    return ModelSpec(
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        _packed(linear),
        saved=_saved_activations(base, text, in_int8),
        embeddings=len(embeddings),
        head=any(embeddings),
        vision=vision,
    )


def unit_parameters(config: Any) -> tuple[int, int]:
    """Parameters that FSDP2 gathers together: outside of the layers (embedding, last norm, head), and in one layer."""
    model = meta_model(config)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m).__name__ in kinds]
    return model.num_parameters() - sum(layers), max(layers, default=0)


def meta_model(config: Any) -> Any:
    with whole_models(), torch.device("meta"):
        return auto_class_of(config).from_config(config)


def _packed(layers: list[nn.Linear]) -> int:
    """Numbers of the built-in engine's packed copies on this machine's CPU."""
    numbers = sum(layer.weight.numel() for layer in layers)
    if packs_for_onednn(numbers):
        return numbers
    step, more = PACKED_ROWS
    return sum((-(-layer.out_features // step) * step + more) * layer.in_features for layer in layers)


def _quantised_layers(model: Any, quantization: Any) -> Iterator[nn.Linear]:
    """Linear layers that transformers would quantise: all except the head, tied and skipped ones."""
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, quantization.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, skipped):
            yield module


def _quantised_bytes(layer: nn.Linear, quantization: Any) -> int:
    """Bytes of a weight in 8 bits with a scale per output, or in 4 bits with a scale per block."""
    numbers = layer.weight.numel()
    if quantization.load_in_8bit:
        return numbers + 4 * layer.out_features
    scales = -(-numbers // BLOCK)
    nested = quantization.bnb_4bit_use_double_quant
    return numbers // 2 + (scales + 4 * -(-scales // NESTED_BLOCK) if nested else 4 * scales)


class _Layer(NamedTuple):
    name: str
    attends: bool
    inputs: int
    outputs: int
    trained: bool
    adapted: bool


def _linear_layers(block: nn.Module) -> list[_Layer]:
    """Linear layers of a block in order, without those of adapters."""
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
    """Layers of a model: its first outermost ModuleList."""
    return list(next((module for module in part.modules() if isinstance(module, nn.ModuleList)), ()))


def _saved_activations(base: Any, text: Any, in_int8: bool) -> SavedActivations | None:
    blocks = _blocks(base.get_decoder())
    block = blocks[-1] if blocks else nn.Identity()
    linear = _linear_layers(block)
    if len(blocks) != text.num_hidden_layers or not linear:
        return None
    reading = [layer for layer in linear if layer.inputs == text.hidden_size and layer.outputs != text.hidden_size]
    attending = [layer for layer in linear if layer.attends and layer.inputs == text.hidden_size]
    attending = attending[:-1] if attending and attending[-1].outputs == text.hidden_size else attending
    fused = any(p.dim() == 3 and p.requires_grad for p in block.parameters())  # experts
    mlp = [layer for layer in reading if not layer.attends]
    ranks = sum(p.shape[0] for name, p in block.named_parameters() if "lora_A" in name)
    norms = {name: p for name, p in block.named_parameters() if p.dim() == 1 and name.endswith("weight")}
    return SavedActivations(
        norms=any(p.requires_grad for p in norms.values()),
        wide=sum(len(p) == text.hidden_size and "attn." not in name for name, p in norms.items()),
        heads=any("q_norm" in name for name in norms),
        attention=3 if in_int8 else sum(layer.trained for layer in attending),
        mlp=2 if in_int8 or fused else sum(layer.trained for layer in mlp),
        down=in_int8 or fused or any(layer.trained for layer in linear if not layer.attends and layer not in reading),
        ranks=ranks,
        passing=sum(
            layer.outputs
            for layer in linear
            if layer.adapted or layer.outputs == text.hidden_size or layer.name.endswith(("q_proj", "k_proj"))
        ),
    )


def _vision_encoder(model: Any, base: Any) -> VisionEncoderSpec:
    """Sizes of the image encoder and the aligner.

    Attention saves queries, keys, values and its result, the MLP the input and output of its nonlinearity: two inputs
    with a gate, and the product.
    """
    parts, named = part_names(model), dict(model.named_parameters())
    trained = {part for name, part in parts.items() if named[name].requires_grad}
    encoder = base.get_encoder(modality="image")
    blocks = _blocks(encoder)
    linear = _linear_layers(blocks[0])
    hidden = linear[0].inputs
    attending = [layer for layer in linear if layer.attends]
    others = [layer for layer in linear if not layer.attends]
    # In addition to one product for all three: rotated queries and keys, and the concatenated results of images.
    apart = 3 * hidden * (len(attending) == 2)
    mlp = (4 if len(others) > 2 else 2) * others[-1].inputs
    aligning = {id(named[name]) for name, part in parts.items() if part == "aligner"}
    inside = set(encoder.modules())

    def saved_by_aligner(within: bool) -> int:
        linear = (m for m in base.modules() if isinstance(m, nn.Linear) and id(m.weight) in aligning)
        saved = sum(layer.in_features + layer.out_features for layer in linear if (layer in inside) == within)
        return saved if trained - {"llm"} else 0

    return VisionEncoderSpec(
        layers=len(blocks),
        channels=sum(layer.outputs for layer in attending) + apart + mlp if "vit" in trained else 0,
        hidden=hidden,
        readers=len(linear) - 2,
        passing=sum(layer.outputs for layer in linear) if linear[0].adapted else 2 * hidden,
        merger=saved_by_aligner(within=True),
        aligner=saved_by_aligner(within=False),
        packed=_packed([m for m in encoder.modules() if type(m) is nn.Linear]),
    )
