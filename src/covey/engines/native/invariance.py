"""Products and functions on a CPU that give a row the same bits, whatever other rows are computed with it.

Libraries choose a kernel by the number of rows, and threads divide the rows: on many processors a row of a float32
product has other last bits in a product of one to three rows than in one of four, and with two threads the last of five
rows differs from the others. Therefore row counts are tested with copies of one row, once per process, kernel, shape,
dtype and number of threads, when a count is first needed. Rows are then padded to the next count that gives the bits of
the reference (`REFERENCES`), or divided into pieces of such counts. Nothing here knows a library's rules; a count that
fails the test costs time, never exactness.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

REFERENCES = (64, 16, 4, 1)  # row counts to compare others with: the first at which equal rows get equal bits
LARGEST = 256  # most rows of one product: larger numbers would be measured for every length of a prompt
STRIDE = 4  # above the reference, row counts are multiples of it
CHUNK = 256  # most columns that attention's products add up at once: how libraries divide longer sums is not known
COLUMNS = 16  # columns of attention are multiples of this, so that a token keeps its place within a vector register
VECTOR = 64  # most numbers that elementwise functions compute at once; a remainder is computed by another function
GRAIN = 32768  # numbers from which on elementwise functions are divided among threads
FEWEST_NUMBERS = 8  # nonzero numbers that a row must have for equal bits to prove anything about the kernel
ALIGNMENT = 64  # bytes; PyTorch allocates tensors at multiples of this, and products use other kernels for others

Piece = tuple[int, int]  # number of rows, and the row count of the product that computes them


class RowCounts:
    """Row counts at which a kernel gives a row at every index the bits of the reference; tested as they are needed.

    Kernels of one name and shape share the results, whichever of them was tested.
    """

    def __init__(self, row: Tensor, kernel: Callable[[Tensor], Tensor]):
        """`row` [1, ...] is any input of the kernel, [n, ...] -> [n, ...]."""
        self._row = row
        for self.reference in REFERENCES:
            rows = self._of_copies(self.reference, kernel)
            if bool((rows == rows[:1]).all()):
                break
        # products with zeros, as of a new adapter, prove nothing about other weights of this shape
        self.informative = int((kernel(row) != 0).sum()) >= min(FEWEST_NUMBERS, rows[0].numel())
        self._hold: dict[int, bool] = {self.reference: True}
        self._pieces: dict[int, tuple[Piece, ...]] = {}

    def _of_copies(self, count: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        return bits(kernel(self._row.repeat(count, *[1] * (self._row.dim() - 1))))

    def hold(self, count: int, kernel: Callable[[Tensor], Tensor]) -> bool:
        """True if a row has the reference's bits at every index of a product of `count` rows."""
        if count not in self._hold:
            expected = self._of_copies(self.reference, kernel)[:1]
            self._hold[count] = bool((self._of_copies(count, kernel) == expected).all())
        return self._hold[count]

    def pieces(self, rows: int, kernel: Callable[[Tensor], Tensor]) -> tuple[Piece, ...]:
        """Pieces for `rows` rows: 3 as ((3, 4),) if a count of 4 is suitable, 300 as ((256, 256), (44, 44))."""
        if rows not in self._pieces:
            self._pieces[rows] = tuple(self._cut(rows, kernel))
        return self._pieces[rows]

    def _cut(self, rows: int, kernel: Callable[[Tensor], Tensor]) -> list[Piece]:
        if rows <= self.reference:
            return [(rows, next(count for count in range(rows, self.reference + 1) if self.hold(count, kernel)))]
        whole = -(-rows // STRIDE) * STRIDE
        if rows <= LARGEST and self.hold(whole, kernel):
            return [(rows, whole)]
        size = LARGEST if rows > LARGEST and self.hold(LARGEST, kernel) else self.reference
        return [(size, size)] * (rows // size) + (self._cut(rows % size, kernel) if rows % size else [])

    def apply(self, kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Results of a kernel for all rows of x [n, ...]."""
        count = x.shape[0]
        pieces = self.pieces(count, kernel)
        if pieces[0][1] == count:
            return kernel(aligned(x))
        results, start = [], 0
        for rows, computed in pieces:
            part = x[start : start + rows]
            if computed > rows:
                part = torch.cat([part, part.new_zeros(computed - rows, *part.shape[1:])])
            results.append(kernel(aligned(part))[:rows])
            start += rows
        return results[0] if len(results) == 1 else torch.cat(results)


def bits(x: Tensor) -> Tensor:
    """Integers with the same bits, for comparison: a NaN equals itself, and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def aligned(x: Tensor) -> Tensor:
    """The tensor, contiguous and aligned as PyTorch's own allocations are."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Measured:
    """Measurements of this process, by kernel, shape, dtype and number of threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def get(self, kernel: Hashable) -> Any:
        return self._known.get(self._key(kernel))

    def put(self, kernel: Hashable, found: Any) -> None:
        self._known[self._key(kernel)] = found

    def _key(self, kernel: Hashable) -> Hashable:
        return kernel, torch.get_num_threads(), torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")


measured = Measured()


def row_counts(name: Hashable, kernel: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> RowCounts:
    """Row counts of the kernels x [n, width] -> [n, out] of this name and shape, measured once."""
    known: RowCounts | None = measured.get(name)
    if known is None:
        known = RowCounts(random(1, width, dtype=dtype), kernel)
        if known.informative:
            measured.put(name, known)
    return known


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias of [..., in] and [out, in], where each row has the same bits in any batch."""
    if x.device.type != "cpu" or weight.dim() != 2 or not x.numel():
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    key = ("linear", *weight.shape, weight.stride(), x.dtype, weight.dtype, bias is None)
    counts = row_counts(key, multiply := partial(nn.functional.linear, weight=weight, bias=bias), x.shape[-1], x.dtype)
    return counts.apply(multiply, rows).view(*x.shape[:-1], len(weight))


class AttentionShape(NamedTuple):
    """Shape of a layer's attention."""

    queries: int  # query heads per key/value head
    kv_heads: int
    dim: int
    value_dim: int


class AttentionSizes:
    """Sizes of a decoding step's attention products at which a query has the bits of a reference, on a CPU.

    The reference has `CHUNK` columns and one thread. Columns after a sequence's last token are masked: their weight is
    0.
    """

    def __init__(self, shapes: Iterable[AttentionShape], dtype: torch.dtype):
        self._shapes = sorted(shapes)
        self._dtype = dtype
        self._chosen: dict[tuple[int, ...], Any] = {}

    def columns(self, longest: int, sequences: int) -> int:
        """Columns to compute for the own tokens of `sequences` sequences, of which the longest has `longest`."""

        def hold(columns: int) -> bool:
            return all(
                _hold(shape, shape.queries, columns, sequences * shape.kv_heads, self._dtype) for shape in self._shapes
            )

        whole, rest = divmod(longest, CHUNK)
        key = (rest, min(whole, 1), sequences, torch.get_num_threads())
        if key not in self._chosen:
            suitable = (n for n in range(-(-rest // COLUMNS) * COLUMNS, CHUNK, COLUMNS) if n and hold(n))
            self._chosen[key] = next(suitable, CHUNK) if rest else 0
        return whole * CHUNK + int(self._chosen[key])

    def prompts(self, longest: int, slots: int, groups: int) -> tuple[int, int]:
        """Columns and slots to compute for the prompts of `groups` groups, of at least `slots` sequences each."""
        whole, rest = divmod(longest, CHUNK)
        key = (rest, min(whole, 1), slots, groups, torch.get_num_threads())
        if key not in self._chosen:
            self._chosen[key] = self._prompts(whole > 0, rest, slots, groups)
        columns, slots = self._chosen[key]
        return whole * CHUNK + columns, slots

    def _prompts(self, whole: bool, rest: int, slots: int, groups: int) -> tuple[int, int]:
        def hold(columns: int, slots: int) -> bool:
            return all(
                _hold(shape, None, size, groups * shape.kv_heads, self._dtype, slots * shape.queries)
                for shape in self._shapes
                for size in ([CHUNK] if whole else []) + ([columns] if columns else [])
            )

        for columns in range(-(-rest // COLUMNS) * COLUMNS, (CHUNK if rest else 0) + 1, COLUMNS):
            for more in range(slots, max(slots, REFERENCES[1]) + 2):
                if hold(columns, more):
                    return columns, more
        return (CHUNK if rest else 0), slots


def _hold(
    shape: AttentionShape, alike: int | None, columns: int, batch: int, dtype: torch.dtype, rows: int | None = None
) -> bool:
    """True if each of `rows` queries of `batch` products has the bits of the reference with `columns` columns.

    `alike`: rows of the reference; None: the first of `REFERENCES` at which equal rows get equal bits.
    """
    threads, rows = torch.get_num_threads(), rows or shape.queries
    if batch > 8 * threads:  # how threads share products depends on what is left over
        batch = 8 * threads + batch % threads
    name = ("attention", shape.dim, shape.value_dim, dtype, alike, columns, batch, rows)
    known: bool | None = measured.get(name)
    if known is None:
        expected = _reference(shape, alike, columns, dtype)
        known = True
        try:
            for few in {1, threads}:  # small products are computed by one thread
                torch.set_num_threads(few)
                found = _attended(shape, rows, columns, columns, batch, dtype)
                known &= all(bool((bits(x) == bits(row)).all()) for x, row in zip(found, expected, strict=True))
        finally:
            torch.set_num_threads(threads)
        measured.put(name, known)
    return known


def _reference(shape: AttentionShape, alike: int | None, columns: int, dtype: torch.dtype) -> list[Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in REFERENCES if alike is None else [alike]:
            found = _attended(shape, rows, CHUNK, columns, 2, dtype)
            first = [x[:1, :, :1] for x in found]
            if all(bool((bits(x) == bits(row)).all()) for x, row in zip(found, first, strict=True)):
                break
        return [first[0][..., :columns], *first[1:]]
    finally:
        torch.set_num_threads(threads)


def _attended(
    shape: AttentionShape, rows: int, columns: int, visible: int, batch: int, dtype: torch.dtype
) -> list[Tensor]:
    """Scores of copies of one query, and averages of values up to `visible` columns and fewer."""
    stored = CHUNK + COLUMNS  # as in a cache, which is wider than what is read
    keys = random(stored, shape.dim, dtype=dtype).repeat(batch, 1, 1, 1)[:, :, :columns]
    values = random(stored, shape.value_dim, dtype=dtype, seed=1).repeat(batch, 1, 1, 1)[:, :, :columns]
    query = random(1, shape.dim, dtype=dtype, seed=2).repeat(batch, 1, rows, 1)
    found = [query @ keys.transpose(2, 3)]
    for end in (visible, max(1, visible - COLUMNS // 2), 1 + visible // 2):
        weights = torch.zeros(batch, 1, rows, columns, dtype=dtype)
        weights[..., :end] = random(1, CHUNK, dtype=dtype, seed=3).abs()[:, :end]
        found.append(weights @ values)
    return found


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """function(x) of an elementwise function, where a number has the same bits at any index.

    Libraries compute vectors of numbers by one function, and the remainder at the end of a thread's share by another,
    which rounds differently. x is padded so that there is no remainder.
    """
    if x.device.type != "cpu" or not x.is_floating_point() or not x.numel() or kwargs.get("inplace"):
        return function(x, *args, **kwargs)
    missing = _missing(x.numel())
    if not missing and (x.is_contiguous() or x.shape[-1] % VECTOR == 0):
        return function(x, *args, **kwargs)
    flat = torch.cat([x.reshape(-1), x.new_ones(missing)]) if missing else x.reshape(-1)
    return function(flat, *args, **kwargs)[: x.numel()].view(x.shape)


def _missing(count: int) -> int:
    """Numbers to add to `count` so that each thread's share is a multiple of `VECTOR`."""
    threads, full = torch.get_num_threads(), count
    while full % (part := VECTOR * max(1, min(threads, -(-full // GRAIN)))):
        full += part - full % part
    return full - count


class InvariantFunctions(TorchFunctionMode):
    """Context in which the products and elementwise functions that a model calls are those of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, replaced = kwargs or {}, _REPLACED.get(func)
        if replaced is None:
            return func(*args, **kwargs)
        named = [name for name in _OPERANDS if name in kwargs]  # a caller may name what others give by place
        others = {name: value for name, value in kwargs.items() if name not in named}
        return replaced(*args, *(kwargs[name] for name in named), **others)


def _matmul(a: Any, b: Any, *rest: Any, function: Callable[..., Any] = torch.matmul, **kwargs: Any) -> Any:
    plain = not rest and not kwargs and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    if not plain or a.device.type != "cpu" or not a.is_floating_point() or not a.numel() or not b.numel():
        return function(a, b, *rest, **kwargs)
    if b.dim() == 2 and a.dim() > 1:
        return linear(a, b.t())
    if a.dim() < 3 or b.dim() < 3 or a.shape[-1] == 1:  # without a sum, every kernel gives the same bits
        return function(a, b)
    return _batched(a, b)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [..., m, k] and [..., k, n], where a product has the same bits in any batch."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (m, k), n, count, transposed = a.shape[-2:], b.shape[-1], lead.numel(), b.stride(-2) == 1

    def multiply(x: Tensor) -> Tensor:
        second = x[:, m * k :].reshape(-1, n, k).mT if transposed else x[:, m * k :].reshape(-1, k, n)
        return (x[:, : m * k].reshape(-1, m, k) @ second).flatten(1)

    counts = row_counts(("batched", m, k, n, a.dtype, transposed), multiply, m * k + k * n, a.dtype)
    first, second = (x.expand(*lead, *x.shape[-2:]).reshape(count, -1) for x in (a, b.mT if transposed else b))
    return counts.apply(multiply, torch.cat([first, second], dim=1)).view(*lead, m, n)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *rest: Any, function: Any = torch.addmm, **kwargs: Any) -> Tensor:
    if rest or kwargs or bias.dim() != 1:
        return function(bias, a, b, *rest, **kwargs)
    return linear(a, b.t(), bias)


def _grouped_mm(x: Tensor, weights: Tensor, *rest: Any, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Products of experts: rows offs[e - 1] to offs[e] times weights[e], of [experts, in, out]."""
    given = rest or any(value is not None for value in kwargs.values())
    if given or offs is None or x.dim() != 2 or weights.dim() != 3 or x.device.type != "cpu":
        return nn.functional.grouped_mm(x, weights, *rest, offs=offs, **kwargs)
    out, start = x.new_zeros(len(x), weights.shape[2]), 0
    for weight, stop in zip(weights, offs.tolist(), strict=True):
        if stop > start:
            out[start:stop] = linear(x[start:stop], weight.t())
        start = stop
    return out


_OPERANDS = ("input", "mat_a", "mat1", "other", "mat2", "mat_b")
"""Torch's names of the operands of these functions, in their order."""
_FUNCTIONS: tuple[Any, ...] = (
    *(nn.functional.silu, nn.functional.gelu, nn.functional.softplus, nn.functional.mish, nn.functional.elu),
    *(nn.functional.logsigmoid, torch._C._nn.silu, torch._C._nn.softplus, torch.sigmoid, Tensor.sigmoid),
    *(torch.exp, Tensor.exp, torch.log, Tensor.log, torch.tanh, Tensor.tanh, torch.cos, Tensor.cos),
    *(torch.sin, Tensor.sin, torch.rsqrt, Tensor.rsqrt, torch.erf, Tensor.erf, torch.log1p, torch.expm1),
)
_MATMULS: tuple[Any, ...] = (
    *(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__),
)
_REPLACED: dict[Any, Callable[..., Any]] = {
    **{function: partial(elementwise, function) for function in _FUNCTIONS},
    **{f: partial(_matmul, function=f) for f in _MATMULS},
    **{f: partial(_addmm, function=f) for f in (torch.addmm, Tensor.addmm)},
    nn.functional.linear: linear,
    **dict.fromkeys((nn.functional.grouped_mm, torch._grouped_mm), _grouped_mm),
}
