"""Products with packed copies of weights: fewer operations and reads for the few rows of a decoding step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.model import decoder_of, without_adapter
from covey.engines.native.number_formats import (
    Kernel,
    MakeKernel,
    MklKernel,
    OnednnKernel,
    RoundedKernel,
    row_invariant,
)
from covey.runtime.processor import onednn_is_faster

LARGE_MODEL = 1 << 25  # numbers in a model's linear layers from which oneDNN's longer calls are worth it
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module that read one input
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of a config: outputs of a router


@dataclass(eq=False)
class Packed:
    """The packed layers of a model, within `packed_linears`."""

    rounds: bool = True  # False: rounded layers multiply with their exact weights

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Context in which rounded layers multiply with their exact weights, for comparisons of two implementations."""
        before, self.rounds = self.rounds, False
        try:
            yield
        finally:
            self.rounds = before


@contextmanager
def packed_linears(model: nn.Module, dtype: str | None = None) -> Iterator[Packed]:
    """Context in which the model's plain `nn.Linear`s multiply with packed copies of their weights.

    Without a `dtype`, layers in float32 on a CPU use MKL or oneDNN: the same product, 1.1 to 2 times as fast for 4 to
    64 rows. With a `dtype` ("bfloat16", "int8" or "float8"), weights and inputs are rounded to that format
    (`number_formats`) on any device, except embeddings, adapters and routers of experts. On a CPU a row has the same
    bits in any batch (`invariance`). The copies take memory, and the weights must not change within the context.
    Quantised weights and patched modules are not packed.
    """
    packed, groups = Packed(), list[list[Any]]()
    try:
        if dtype is not None:
            groups = _groups(model, roundable(model))
            _patch(groups, partial(RoundedKernel, dtype), packed)
        if torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu"):
            others = _groups(model, [module for module in model.modules() if _is_plain(module)])
            onednn = packs_for_onednn(sum(x.weight.numel() for group in others for x in group))
            _patch(others, partial(row_invariant, OnednnKernel if onednn else MklKernel), None)
            groups += others
        yield packed
    finally:
        for module in (module for group in groups for module in group):
            vars(module).pop("forward", None)


def packs_for_onednn(numbers: int) -> bool:
    """True if a model with so many numbers in its linear layers multiplies with oneDNN's copies instead of MKL's."""
    return numbers >= LARGE_MODEL and onednn_is_faster(few_rows=True)


def _patch(groups: Sequence[Sequence[Any]], make: MakeKernel, packed: Packed | None) -> None:
    for group in groups:
        product = PackedProduct(group, make, packed)
        for index, module in enumerate(group):
            module.forward = PackedPart(product, index)


def _groups(model: nn.Module, layers: Sequence[Any]) -> list[list[Any]]:
    """The layers, with those that read one input joined; a layer that modules share occurs once."""
    wanted, groups = set(layers), list[list[Any]]()
    for parent in model.modules():
        for names in JOINED:
            parts: list[Any] = [getattr(parent, name, None) for name in names]
            if wanted.issuperset(parts) and len({(x.weight.shape[1], x.bias is None) for x in parts}) == 1:
                groups.append(parts)
    joined = {layer for group in groups for layer in group}
    return [*groups, *([layer] for layer in layers if layer not in joined)]


def _is_plain(module: Any) -> bool:
    whole = _is_linear(module)
    return whole and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _is_linear(module: Any) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight: Any = module.weight
    return type(weight) is nn.Parameter and weight.dim() == 2  # ZeRO-3 leaves other shapes


def _is_roundable(weight: Any) -> bool:
    return bool(weight.is_floating_point()) and weight.device.type in ("cpu", "cuda")


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Modules that belong to a PEFT model's adapters; the adapted layers themselves are not among them."""
    tuners: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    parts: list[Any] = [getattr(tuner, name, None) for tuner in tuners for name in tuner.adapter_layer_names]
    return {module for part in parts if isinstance(part, nn.Module) for module in part.modules()}


def roundable(model: nn.Module) -> list[Any]:
    """Linear layers of decoder and head whose weights may be rounded: on a CPU or CUDA GPU, no adapters or routers."""
    adapters = adapter_modules(model)
    config: Any = getattr(without_adapter(model), "config", None)
    text = config.get_text_config() if config is not None else None
    experts = {getattr(text, name, None) for name in EXPERTS}
    whole: Any = model
    parts = [decoder_of(model), whole.get_output_embeddings()] if hasattr(model, "get_decoder") else [model]
    return [
        module
        for module in dict.fromkeys(module for part in parts if part is not None for module in part.modules())
        if _is_linear(module)
        and module not in adapters
        and module.out_features not in experts
        and _is_roundable(module.weight)
    ]


@dataclass(eq=False)
class PackedProduct:
    """x @ W.T + b of all layers that read one input: [..., in] -> [..., sum of out]; packed on the first call."""

    layers: Sequence[Any]
    make: MakeKernel
    packed: Packed | None = None  # its `rounds` says whether to round; None: `make` does not round
    _kernel: Kernel | None = None
    _width: int = 0  # sum of the layers' outputs
    _read: Tensor | None = None  # input of `_parts`
    _parts: dict[int, Tensor] = field(default_factory=dict)  # products of layers that have not been called yet

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and not self.packed.rounds:
            return torch.cat([nn.functional.linear(x, layer.weight, layer.bias) for layer in self.layers], dim=-1)
        if self._kernel is None:
            self._kernel = self._packed_kernel()
            self._width = sum(self._widths())
        return self._kernel(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._width)

    def takes(self, x: Tensor) -> bool:
        return bool(x.numel()) and (x.is_floating_point() if self.packed is not None else x.dtype == torch.float32)

    def _packed_kernel(self) -> Kernel:
        weights, biases = [layer.weight.detach() for layer in self.layers], [layer.bias for layer in self.layers]
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)  # a head is large: no second copy of it
        return self.make(joined, bias)

    def _widths(self) -> list[int]:
        """Outputs of the layers, by their weights: PEFT's tied heads have `in_features` and `out_features` swapped."""
        return [len(layer.weight) for layer in self.layers]

    def part(self, index: int, x: Tensor) -> Tensor:
        """Product with one of the layers; the other layers' products are kept for calls with the same input."""
        if x is not self._read or index not in self._parts:
            self._read = x
            self._parts = dict(enumerate(self(x).split(self._widths(), dim=-1)))
        return self._parts.pop(index)


@dataclass(frozen=True)
class PackedPart:
    """Replacement for the forward of a layer whose weights are packed."""

    product: PackedProduct
    index: int

    def __call__(self, input: Tensor) -> Tensor:  # as nn.Linear names it
        if self.product.takes(input):
            return self.product.part(self.index, input).to(_result_dtype(input))
        layer = self.product.layers[self.index]
        return nn.functional.linear(input, layer.weight, layer.bias)


def _result_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a linear layer's result."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
