"""Products with packed copies of CPU weights: fewer operations and reads for the few rows of a decoding step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from covey.engines.native.invariance import RowCounts, row_counts
from covey.runtime.processor import onednn_is_faster

PACKED_ROWS = 64  # row count that weights are packed for; products with other counts are as exact
FEWEST_ROWS = 4  # of oneDNN's products with AVX-512: of one to three rows they take longer than of four
LARGE_MODEL = 1 << 25  # numbers in a model's linear layers from which oneDNN's longer calls are worth it
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module that read one input


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Multiply the model's plain float32 CPU `nn.Linear`s with copies of their weights packed by MKL or oneDNN.

    The same product, 1.1 to 2 times as fast for 4 to 64 rows, and a row has the same bits among any others
    (`invariance`). The copies take as much memory as the weights, which must not change within the context. Quantised
    weights, adapters and patched modules are left alone.
    """
    groups: list[list[Any]] = []
    try:
        if torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu"):
            groups = _groups(model)
            large = sum(x.weight.numel() for group in groups for x in group) >= LARGE_MODEL
            onednn = large and onednn_is_faster(few_rows=True)
            for group in groups:
                product = PackedProduct(group, onednn)
                for index, module in enumerate(group):
                    module.forward = PackedPart(product, index)
        yield
    finally:
        for module in (module for group in groups for module in group):
            vars(module).pop("forward", None)


def _groups(model: nn.Module) -> list[list[Any]]:
    """Plain layers, those that read one input together; each once, though modules may share it."""
    groups: list[list[Any]] = []
    for parent in model.modules():
        for names in JOINED:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(_is_plain, layers)) and len({(x.in_features, x.bias is None) for x in layers}) == 1:
                groups.append(layers)
    joined = {layer for group in groups for layer in group}
    return [*groups, *([module] for module in model.modules() if _is_plain(module) and module not in joined)]


def _is_plain(module: Any) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight: Any = module.weight
    whole = type(weight) is nn.Parameter and weight.dim() == 2  # ZeRO-3 leaves other shapes
    return whole and weight.device.type == "cpu" and weight.dtype == torch.float32


@dataclass(eq=False)
class PackedProduct:
    """x @ W.T + b of layers that read one input, [..., in] -> [..., sum of out]; packed on the first call."""

    layers: Sequence[Any]
    onednn: bool
    _packed: Tensor | None = None
    _bias: Tensor | None = None
    _width: int = 0  # sum of the layers' outputs
    _counts: dict[int, RowCounts] = field(default_factory=dict)  # by the number of threads
    _read: Tensor | None = None  # input of `_parts`
    _parts: dict[int, Tensor] = field(default_factory=dict)  # products of single layers that nobody has asked for yet

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = self._pack()
            self._width = sum(layer.out_features for layer in self.layers)
        counts = self._counts.get(torch.get_num_threads()) or self._count_rows(x)
        return counts.apply(self._multiply, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._width)

    def _count_rows(self, x: Tensor) -> RowCounts:
        """Row counts of this product, which are kept once they say something."""
        key = ("onednn" if self.onednn else "mkl", self._width, x.shape[-1], self._bias is None)
        counts = row_counts(key, self._multiply, x.shape[-1], x.dtype)
        if counts.informative:
            self._counts[torch.get_num_threads()] = counts
        return counts

    def _multiply(self, x: Tensor) -> Tensor:
        """Product of rows [n, in] in one call of the library."""
        rows = x.shape[0]
        if not self.onednn:
            # Of the third argument the operator reads the shape alone while the last one equals the rows of x.
            shape = x.new_empty(1, 1).expand(self._width, x.shape[-1])
            return torch.ops.mkl._mkl_linear(x, self._packed, shape, self._bias, rows)
        if rows < FEWEST_ROWS and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
            x = nn.functional.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")[:rows]

    def _pack(self) -> Tensor:
        weights, biases = [layer.weight.detach() for layer in self.layers], [layer.bias for layer in self.layers]
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        library = torch.ops.mkldnn if self.onednn else torch.ops.mkl
        pack = library._reorder_linear_weight if self.onednn else library._mkl_reorder_linear_weight
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)  # a head is large: no second copy of it
        packed: Tensor = pack(joined, PACKED_ROWS)
        return packed

    def part(self, index: int, x: Tensor) -> Tensor:
        """Product with one of the layers; the others' are kept until they are asked for with the same input."""
        if x is not self._read or index not in self._parts:
            self._read = x
            self._parts = dict(enumerate(self(x).split([layer.out_features for layer in self.layers], dim=-1)))
        return self._parts.pop(index)


@dataclass(frozen=True)
class PackedPart:
    """Forward of a layer whose weights are packed."""

    product: PackedProduct
    index: int

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.numel():
            return self.product.part(self.index, x)
        layer = self.product.layers[self.index]
        return nn.functional.linear(x, layer.weight, layer.bias)
