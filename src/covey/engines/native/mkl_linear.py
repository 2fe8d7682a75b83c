"""Linear layers with their weights in the order the matrix kernels read them, for as long as nothing changes them.

Decoding multiplies a few rows with every weight of the model, thousands of times between two updates. MKL can be given
the weights packed once: the same product, 1.1 to 1.5 times as fast for 4 to 64 rows. Not here: quantised weights,
adapters, other devices; their modules stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TYPICAL_ROWS = 64
"""The row count MKL packs for; products with other counts are as exact."""

MOST_ROWS = 256
"""With more rows than this packing wins nothing: the product is bound by arithmetic."""


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Within the context the model's plain float32 CPU `nn.Linear`s multiply with packed copies of their weights.

    The copies take as much memory as the weights and are dropped at the end. Weights must not change meanwhile.
    Nothing happens without MKL, under autocast, or to a module whose `forward` is somebody else's.
    """
    swapped: list[Any] = []
    try:
        if torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu"):
            for module in model.modules():
                if _is_plain(module):
                    module.forward = _packed_forward(module)
                    swapped.append(module)
        yield
    finally:
        for module in swapped:
            del module.forward


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    if weight.dim() != 2:  # what ZeRO-3 leaves of it
        return False
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


def _packed_forward(module: Any) -> Any:
    """`module.forward` that packs on the first call with few rows, so that a context without any costs nothing."""
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    packed: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if x.dtype != torch.float32 or not 0 < rows <= MOST_ROWS:
            return nn.functional.linear(x, weight, bias)
        if not packed:
            packed.append(torch.ops.mkl._mkl_reorder_linear_weight(weight, TYPICAL_ROWS))
        # The operator uses the packed copy only if x has the rows it is told were packed for.
        return torch.ops.mkl._mkl_linear(x, packed[0], weight, bias, rows)

    return forward
