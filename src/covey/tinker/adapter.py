"""LoRA adapters over one frozen model: their matrices, and the model with one of them added."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.model import decoder_of, patched_forward
from covey.engines.native.adapter_engine import LowRank
from covey.tinker.errors import Refusal

ALPHA = 32.0  # α of LoRA: an adapter's products are scaled by α / rank


@dataclass(frozen=True)
class AdapterSpec:
    """Settings of an adapter: its rank, the seed of its start, and the layers that it trains."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True  # the language-modelling head

    @property
    def scale(self) -> float:
        return ALPHA / self.rank


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter (arXiv 2106.09685): a layer W computes W x + α / rank · B A x.

    Matrices by the names of the model's layers: A [rank, in] and B [out, rank], float32, with gradients.
    """

    spec: AdapterSpec
    matrices: dict[str, tuple[nn.Parameter, nn.Parameter]]

    @classmethod
    def new(cls, model: Any, spec: AdapterSpec) -> "Adapter":
        """An adapter that changes nothing yet: A uniform in ±1/√in, B zero."""
        generator = torch.Generator().manual_seed(spec.seed)
        matrices = {}
        for name, layer in layers_of(model, spec).items():
            bound = 1 / math.sqrt(layer.in_features)
            a = torch.rand(spec.rank, layer.in_features, generator=generator) * 2 * bound - bound
            b = torch.zeros(layer.out_features, spec.rank)
            device = layer.weight.device
            matrices[name] = nn.Parameter(a.to(device)), nn.Parameter(b.to(device))
        return cls(spec, matrices)

    def parameters(self) -> list[nn.Parameter]:
        return [matrix for pair in self.matrices.values() for matrix in pair]

    def low_rank(self) -> LowRank:
        """A, and B times the scale, of each layer; gradients flow to the adapter."""
        return {name: (a, b * self.spec.scale) for name, (a, b) in self.matrices.items()}

    def frozen(self) -> LowRank:
        """A copy of `low_rank` that no later step changes."""
        return {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.low_rank().items()}

    def saved(self) -> dict[str, Tensor]:
        """The matrices under the names that PEFT gives them in a checkpoint, without the scale."""
        return {name: matrix.detach().cpu().contiguous() for name, matrix in self.named().items()}

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters under the names that PEFT gives them in a checkpoint."""
        kinds = ("lora_A", "lora_B")
        return {
            f"base_model.model.{name}.{kind}.weight": matrix
            for name, pair in self.matrices.items()
            for kind, matrix in zip(kinds, pair, strict=True)
        }


@contextmanager
def added(model: nn.Module, low_rank: LowRank) -> Iterator[None]:
    """Add these products to the outputs of the model's layers in this context; run backward passes inside it, too."""
    with ExitStack() as patches:
        for name, (a, b) in low_rank.items():
            layer = model.get_submodule(name)
            patches.enter_context(patched_forward(layer, partial(_forward, layer.forward, a, b)))
        yield


def _forward(base: Any, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    y: Tensor = base(x)
    return y + nn.functional.linear(nn.functional.linear(x.to(a.dtype), a), b).to(y.dtype)


def layers_of(model: Any, spec: AdapterSpec) -> dict[str, nn.Linear]:
    """The layers that an adapter trains, by name; Refusal for a switch without a layer in this model."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    inside = set(decoder.modules())
    linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    attention = {name for name, layer in linear.items() if layer in inside and "attn" in name.rpartition(".")[0]}
    parts = {
        "train_attn": attention,
        "train_mlp": {name for name, layer in linear.items() if layer in inside} - attention,
        "train_unembed": {name for name, layer in linear.items() if layer is head and layer not in inside},
    }
    wanted = set[str]()
    for switch, names in parts.items():
        if getattr(spec, switch):
            if not names:
                raise Refusal(f"{switch}=True: {type(model).__name__} has no such linear layer. Set {switch}=False.")
            wanted |= names
    if not wanted:
        raise Refusal("train_attn, train_mlp and train_unembed are all False, so nothing would be trained.")
    return {name: layer for name, layer in linear.items() if name in wanted}


def bytes_of(model: Any, spec: AdapterSpec) -> int:
    """Bytes that a training client takes: weights, gradients and two moments, in float32."""
    rows = sum(layer.in_features + layer.out_features for layer in layers_of(model, spec).values())
    return 4 * 4 * spec.rank * rows
