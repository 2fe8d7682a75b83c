"""Number formats of decoding: weights and inputs of linear layers in fewer bits, and products of them.

Weights are rounded with one scale per row of the matrix, that is per output; inputs are rounded with one scale per
token, so that a token's product depends on no other token. To add a format, add a row to `FORMATS`; to add a faster
product of a format, add a class like `Int8Onednn` to `FAST`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.engines.native.invariance import RowCounts, row_counts
from covey.runtime.processor import cpu_multiplies_bf16, cpu_multiplies_int8, onednn_is_faster

PACKED_ROWS = 64  # row count that weights are packed for; products with other counts give equal results
FEWEST_ROWS = 4  # rows of oneDNN's products with AVX-512, at least: one to three rows take longer than four
INT_MM_ROWS = 32  # rows of torch's integer product on a GPU, at least: it refuses 16 and fewer
HOPELESS = 20  # times as long as in float32 that a product takes which is computed by a plain loop: measured 180
LEAST_SECONDS = 2e-4  # that the product in float32 is taken to last, to which the clock is exact
MULTIPLE = 16  # 8-bit products on a GPU need weights whose rows and columns are multiples of this


@dataclass(frozen=True)
class Format:
    """A number format. Rows are scaled so that their largest number is `largest`; None: they are not scaled."""

    dtype: torch.dtype
    largest: float | None

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of x [n, k] in this format, and the scales [n, 1] float32 to multiply them with, or None.

        The scale of a row of zeros is arbitrary; a row with NaN or infinity has the scale NaN.

        Example:
            >>> values, scales = FORMATS["int8"].rounded(torch.tensor([[1.27, -0.634, 0.0]]))
            >>> values.tolist(), round(scales.item(), 4)
            ([[127, -63, 0]], 0.01)
        """
        if self.largest is None:
            return x.to(self.dtype), None
        x = x.float()
        scales = (x.abs().amax(dim=-1, keepdim=True) / self.largest).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = x / scales
        return (scaled if self.dtype.is_floating_point else scaled.round()).to(self.dtype), scales


FORMATS = {
    "bfloat16": Format(torch.bfloat16, None),
    "int8": Format(torch.int8, 127.0),
    "float8": Format(torch.float8_e4m3fn, 448.0),  # e4m3: 3 bits after the first
}
"""Formats by the values of `engine_dtype`. Rounding moves a number of int8 by at most 1/254 of its row's largest; of
float8 by at most 1/16 of itself, of bfloat16 by 1/256."""


class Kernel(Protocol):
    """Product with a packed copy of weights: x [n, in] -> [n, out]."""

    name: str  # kernels of one name and shape compute in one way

    def __call__(self, x: Tensor) -> Tensor: ...


MakeKernel = Callable[[Tensor, Tensor | None], Kernel]  # from a weight [out, in] and a bias [out]


class MklKernel:
    """x @ W.T + b in float32 by MKL."""

    name = "mkl"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
        self._bias, self._shape = bias, weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        # If the last argument equals the rows of x, the operator reads only the shape of the third argument.
        shape = x.new_empty(1, 1).expand(self._shape)
        product: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, shape, self._bias, x.shape[0])
        return product


class OnednnKernel:
    """x @ W.T + b by oneDNN, in the dtype of the weight."""

    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < FEWEST_ROWS and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
            x = nn.functional.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product[:rows]


class PlainKernel:
    """x @ W.T + b by torch, with a copy of the weight."""

    name = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight, self._bias)


class RowInvariant:
    """A kernel that on a CPU gives a row the same bits in any batch, by tested row counts (`invariance`).

    The test needs inputs of full precision: sums of rounded numbers are often exact in any order, so equal bits would
    prove nothing about other inputs.
    """

    def __init__(self, kernel: Kernel, weight: Tensor, bias: Tensor | None):
        self.kernel, self.name, self._inputs = kernel, kernel.name, weight.shape[1]
        self._key = (kernel.name, weight.dtype, len(weight), weight.shape[1], bias is None)
        self._counts: dict[int, RowCounts] = {}  # by the number of threads

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self.kernel(x)
        counts = self._counts.get(torch.get_num_threads()) or self._count_rows(x.dtype)
        return counts.apply(self.kernel, x)

    def _count_rows(self, dtype: torch.dtype) -> RowCounts:
        """Row counts of this kernel, kept once the test was conclusive (`FEWEST_NUMBERS`)."""
        counts = row_counts(self._key, self.kernel, self._inputs, dtype)
        if counts.informative:
            self._counts[torch.get_num_threads()] = counts
        return counts


def row_invariant(make: MakeKernel, weight: Tensor, bias: Tensor | None) -> Kernel:
    return RowInvariant(make(weight, bias), weight, bias)


class Product(Protocol):
    """Rounded rows times rounded weights, with the scales of both: values [n, in], scales [n, 1] -> [n, out]."""

    name: str

    def __init__(self, weight: Tensor, scales: Tensor | None): ...  # values [out, in] and scales [out, 1], or None

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor: ...


def _scaled(y: Tensor, columns: Tensor | None, rows: Tensor | None) -> Tensor:
    """y [n, out] float32 times scales [1, out], then times scales [n, 1]: a fixed order of rounding at every entry."""
    return y if columns is None or rows is None else y.mul_(columns).mul_(rows)


class FloatProduct:
    """Product of any format; values are held exactly, as float32 on a CPU and as bfloat16 on a GPU."""

    name = "as numbers"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._dtype = torch.float32 if weight.device.type == "cpu" else torch.bfloat16
        make: MakeKernel = PlainKernel
        if weight.device.type == "cpu" and torch.backends.mkl.is_available():
            make = OnednnKernel if onednn_is_faster(few_rows=True) else MklKernel
        self._kernel = row_invariant(make, weight.to(self._dtype), None)
        self._scales = None if scales is None else scales.view(1, -1)

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        with torch.autocast(values.device.type, enabled=False):
            return _scaled(self._kernel(values.to(self._dtype)).float(), self._scales, scales)


class Bfloat16Onednn:
    """bfloat16 on a CPU with AMX or AVX512-BF16. Results are rounded to bfloat16, too."""

    name = "bfloat16 of onednn"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._kernel = row_invariant(OnednnKernel, weight, None)

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        return self._kernel(values).float()


class Int8Onednn:
    """int8 on a CPU with AMX or VNNI: sums of integers, exact in any order."""

    name = "int8 of onednn"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scales = torch.ones(len(weight)) if scales is None else scales.flatten()
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        given = values, 1.0, 0, self._packed, self._scales, self._zeros, None  # the operator has no scales per token
        y: Tensor = torch.ops.onednn.qlinear_pointwise(*given, 1.0, 0, torch.float32, "none", [], "")
        return y if scales is None else y.mul_(scales)


class Bfloat16Gpu:
    """bfloat16 on a GPU with hardware for it."""

    name = "bfloat16 of the GPU"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._weight = weight

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return nn.functional.linear(values, self._weight).float()


class Int8Gpu:
    """int8 on a GPU: sums of integers, exact in any order."""

    name = "int8 of the GPU"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._weight = weight.t()
        self._scales = None if scales is None else scales.view(1, -1)

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        rows = len(values)
        if (missing := max(INT_MM_ROWS - rows, -rows % 8)) > 0:
            values = nn.functional.pad(values, (0, 0, 0, missing))
        return _scaled(torch._int_mm(values, self._weight)[:rows].float(), self._scales, scales)


class Float8Gpu:
    """float8 on a GPU of compute capability 8.9 and above. Results are rounded to bfloat16."""

    name = "float8 of the GPU"

    def __init__(self, weight: Tensor, scales: Tensor | None):
        self._weight = weight.t()
        self._scales = torch.ones(1, len(weight), device=weight.device) if scales is None else scales.view(1, -1)

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        rows = torch.ones(len(values), 1, device=values.device) if scales is None else scales
        y: Tensor = torch._scaled_mm(values, self._weight, scale_a=rows, scale_b=self._scales, out_dtype=torch.bfloat16)
        return y.float()


FAST: dict[tuple[str, str], tuple[Callable[[], bool], type[Product]]] = {
    ("cpu", "bfloat16"): (cpu_multiplies_bf16, Bfloat16Onednn),
    ("cpu", "int8"): (cpu_multiplies_int8, Int8Onednn),
    ("cuda", "bfloat16"): (lambda: _capability() >= (8, 0), Bfloat16Gpu),
    ("cuda", "int8"): (lambda: _capability() >= (7, 5), Int8Gpu),
    ("cuda", "float8"): (lambda: _capability() >= (8, 9), Float8Gpu),
}
"""By device and format: a test of the hardware, and a product that is faster than that of float32 on it."""


def _capability() -> tuple[int, int]:
    """Compute capability of this machine's GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def fast_product(device: str, name: str) -> type[Product] | None:
    """The class of a format's faster product on this machine; None if there is none, or its results are wrong."""
    suits, kind = FAST.get((device, name), (None, None))
    if suits is None or kind is None or not suits():
        return None
    return kind if _is_right(kind, device, name) and not _is_hopeless(kind, device, name) else None


@cache
def _is_right(kind: type[Product], device: str, name: str) -> bool:
    """True if products of rounded numbers, among them the largest possible ones, agree with float64 up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator) for rows in (5, 64))
    x[0], weight[0] = 1.0, -1.0  # the largest sums
    (values, _), (weights, _) = (FORMATS[name].rounded(matrix.to(device)) for matrix in (x, weight))
    expected = values.double() @ weights.double().T
    try:
        with torch.no_grad():
            found = kind(weights, None)(values, None).double()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
    allowed = 0.0 if FORMATS[name].dtype == torch.int8 else 0.01
    return bool(((found - expected).abs() <= allowed * expected.abs().amax()).all())


@cache
def _is_hopeless(kind: type[Product], device: str, name: str) -> bool:
    """True if a product on a CPU takes `HOPELESS` times as long as in float32.

    oneDNN multiplies by plain loops where it has no kernel for a processor, as for int8 on some with VNNI.
    """
    if device != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)  # that of the run is left alone
    x, weight = (torch.randn(rows, 256, generator=generator) for rows in (16, 512))
    (values, scales), (weights, columns) = (FORMATS[name].rounded(matrix) for matrix in (x, weight))
    product = kind(weights, columns)

    def seconds(multiply: Callable[[], Any]) -> float:
        taken = []
        for _ in range(3):
            began = time.thread_time()
            multiply()
            taken.append(time.thread_time() - began)
        return min(taken)

    with torch.no_grad():
        plain = max(seconds(lambda: nn.functional.linear(x, weight)), LEAST_SECONDS)
        return seconds(lambda: product(values, scales)) > HOPELESS * plain


class RoundedKernel:
    """x @ W.T + b with rows of x and of W rounded to a format: y_ij = s_i t_j sum_k q(x)_ik q(W)_jk + b_j."""

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None):
        self.format = FORMATS[name]
        kind = fast_product(weight.device.type, name)
        fits = weight.device.type == "cpu" or all(size % MULTIPLE == 0 for size in weight.shape)
        chosen: Any = kind if kind is not None and fits else FloatProduct
        self._product: Product = chosen(*self.format.rounded(weight))
        self._bias = None if bias is None else bias.float()
        self.name = f"{name}, {self._product.name}"

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(*self.format.rounded(x))
        return y if self._bias is None else y.add_(self._bias)
