"""Matrix products on a CPU by the faster of two libraries."""

import torch
from torch import Tensor

from covey.runtime.processor import onednn_is_faster

LARGE_PRODUCT = 1 << 26  # multiplications of a product from which oneDNN's longer calls are worth it


def product(x: Tensor, weight: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """x @ weight.T of [n, in] and [out, in], added to `onto` if given; on a CPU by the faster library. No gradients."""
    suits = x.device.type == "cpu" and x.is_contiguous() and x.dtype == weight.dtype == torch.float32
    if suits and len(x) * weight.numel() >= LARGE_PRODUCT and onednn_is_faster():
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result if onto is None else onto.add_(result)
    return x @ weight.T if onto is None else torch.addmm(onto, x, weight.T, out=onto)
