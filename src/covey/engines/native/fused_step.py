"""A decoding step of Llama-like models on a CPU, in two thirds of the operations that the model's own forward takes.

With one token per sequence, most operations of a step are so small that calling them takes longer than computing them,
and distributing them over threads takes longer still. Here layers that read the same input are one product; only
products use all threads, those of attention only if they are large.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.model import decoder_of, rms_norm_epsilon, without_adapter
from covey.engines.native.invariance import VECTOR, InvariantFunctions, elementwise
from covey.engines.native.packed_weights import PackedPart, PackedProduct
from covey.engines.native.shared_prefix_cache import SharedPrefixCache

SMALL = 1 << 17  # numbers in hidden states up to which one thread computes them: torch would use four at most
WORTH_SHARING = 1 << 19  # multiplications in attention's products from which all threads compute them


@dataclass(frozen=True)
class LayerParts:
    """Parts of one decoder layer."""

    norm: Any
    mlp_norm: Any
    head_norms: Sequence[Any]  # norms of queries and keys, or empty
    scaling: float
    activation: Any
    qkv: PackedProduct
    output: PackedProduct
    gate_up: PackedProduct
    down: PackedProduct


class FusedStep:
    """Forward pass over one token per sequence, equal to the model's own up to rounding."""

    def __init__(self, decoder: Any, layers: Sequence[LayerParts], head: PackedProduct):
        self._decoder = decoder
        self._layers = layers
        self._head = head
        self._threads = torch.get_num_threads()
        self._dim = 0  # of a head; 0: not known yet

    def __call__(self, cache: SharedPrefixCache, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Feed every sequence of the cache its newest token, [S] at positions [S]; logits [S, V]."""
        x = self._decoder.embed_tokens(tokens)
        self._few = 1 if x.numel() <= SMALL else self._threads
        torch.set_num_threads(self._few)
        try:
            cos, sin = self._rotations(x, positions)
            half = cos.shape[-1] // 2
            rotation = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            for index, layer in enumerate(self._layers):
                joined = self._product(layer.qkv, _normed(layer.norm, x))
                x = x + self._product(layer.output, self._attend(cache, index, joined, rotation, mask))
                gate, up = self._product(layer.gate_up, _normed(layer.mlp_norm, x)).chunk(2, dim=-1)
                x = x + self._product(layer.down, elementwise(layer.activation, gate).mul_(up))
            return self._product(self._head, _normed(self._decoder.norm, x))
        finally:
            torch.set_num_threads(self._threads)

    def _rotations(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, 1, D]."""
        even = self._dim and len(x) * self._dim % VECTOR == 0
        with nullcontext() if even else InvariantFunctions():
            cos, sin = self._decoder.rotary_emb(x, position_ids=positions[:, None])
        self._dim = cos.shape[-1]
        return cos, sin

    def _product(self, product: PackedProduct, x: Tensor) -> Tensor:
        torch.set_num_threads(self._threads)
        out = product(x)
        torch.set_num_threads(self._few)
        return out

    def _attend(self, cache: Any, index: int, joined: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attention of a layer, from queries, keys and values in one row per sequence; [S, heads * D]."""
        layer, (cos, sin) = self._layers[index], rotation
        size, dim = len(joined), cos.shape[-1]
        heads, kv_heads = (len(linear.weight) // dim for linear in layer.qkv.layers[:2])
        rows, values = joined.view(size, -1, dim).split([heads + kv_heads, kv_heads], dim=1)
        if layer.head_norms:
            parts = zip(layer.head_norms, rows.split([heads, kv_heads], dim=1), strict=True)
            rows = torch.cat([_normed(norm, part) for norm, part in parts], dim=1)
        rotated = torch.addcmul(rows * cos, rows.roll(dim // 2, dims=-1), sin)  # (a, b) cos + (b, a) (-sin, sin)
        query, key = rotated[:, :heads, None] * layer.scaling, rotated[:, heads:, None]
        keys, values = cache.update(key, values[:, :, None], index)
        attended: Tensor = cache.attend(index, query, keys, values, mask, matmul=self._matmul)
        return attended.view(size, -1)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if a.numel() * b.shape[-1] >= WORTH_SHARING:
            torch.set_num_threads(self._threads)
        out = a @ b
        torch.set_num_threads(self._few)
        return out


def _normed(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, rms_norm_epsilon(norm))


def find_fused_step(model: Any) -> FusedStep | None:
    """A `FusedStep` for a model with packed linear layers and a Llama-like decoder; None for any other.

    Parts are found by names and classes of modules. Modules that the step bypasses must have no hooks and no patched
    forward. The caller must compare a step with the model's own, because other operations of a model, such as scaling
    its embeddings, are not recognised here.
    """
    config, decoder, head = model.config.get_text_config(), decoder_of(model), model.get_output_embeddings()
    capped = getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None)
    parts = [_parts_of(layer) for layer in getattr(decoder, "layers", ())]
    layers, product = [part for part in parts if part is not None], _product_of(head)
    named = {"embed_tokens", "rotary_emb", "norm"} <= _children(decoder) and rms_norm_epsilon(decoder.norm) is not None
    if capped or not layers or len(layers) < len(parts) or product is None or not named:
        return None
    called = {decoder.embed_tokens, decoder.rotary_emb, *(layer.activation for layer in layers)}
    if without_adapter(model) is not model or not all(_is_untouched(x) for x in model.modules() if x not in called):
        return None
    return FusedStep(decoder, layers, product)


def _parts_of(layer: Any) -> LayerParts | None:
    if _children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    attention, mlp, names = layer.self_attn, layer.mlp, _children(layer.self_attn) - {"rotary_emb"}
    head_norms = [attention.q_norm, attention.k_norm] if {"q_norm", "k_norm"} <= names else []
    known = {"q_proj", "k_proj", "v_proj", "o_proj"} | ({"q_norm", "k_norm"} if head_norms else set())
    if names != known or attention._parameters or _children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    qkv = _product_of(attention.q_proj, attention.k_proj, attention.v_proj)
    output, down = _product_of(attention.o_proj), _product_of(mlp.down_proj)
    gate_up = _product_of(mlp.gate_proj, mlp.up_proj)
    norm, mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
    others = any(rms_norm_epsilon(x) is None for x in (norm, mlp_norm, *head_norms))
    if others or not (qkv and output and gate_up and down):
        return None
    return LayerParts(norm, mlp_norm, head_norms, attention.scaling, mlp.act_fn, qkv, output, gate_up, down)


def _product_of(*layers: Any) -> PackedProduct | None:
    """The packed product of exactly these layers; None if there is none."""
    parts = [vars(layer).get("forward") for layer in layers]
    products = [part.product for part in parts if isinstance(part, PackedPart)]
    return products[0] if products and products[0].layers == list(layers) else None


def _is_untouched(module: Any) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, PackedPart | None) and not (module._forward_hooks or module._forward_pre_hooks)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
