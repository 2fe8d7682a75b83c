"""Attention of a decoding step in Triton: one query per sequence, over its group's prompt and its own tokens.

One kernel replaces twenty small ones of torch, whose launches cost more than their work. A program computes one
sequence, one key/value head and one of several splits of the keys, with an online softmax in float32 (Dao et al. 2022,
arXiv 2205.14135, and its split over keys for decoding); a second kernel adds the splits up. Importing this module
imports triton. `SharedPrefixCache.attend` is the reference implementation.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.engines.native.shared_prefix_cache import SlotMap
from covey.runtime.user_code import warn

BLOCK = 64  # keys that a program reads at once
LEAST_KEYS = 256  # fewest keys of a split
PROGRAMS = 264  # programs that keep a large GPU busy: two for each multiprocessor of an H100
TOLERANCE = 2e-2  # largest difference from torch, of averages of standard normal values: half precision


@triton.jit
def _step(
    q, keys, values, key_stride, value_stride, first, stop, peak, total, out, DIM: tl.constexpr, SIZE: tl.constexpr
):
    """Attend to the keys `first` to `stop`, with the running maximum, sum and output of the softmax."""
    dims = tl.arange(0, DIM)
    for base in range(first, stop, SIZE):
        column = base + tl.arange(0, SIZE)
        inside = column < stop
        place = column.to(tl.int64)[:, None]
        k = tl.load(keys + place * key_stride + dims[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values + place * value_stride + dims[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k)), -float("inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        fall = tl.exp(peak - new)
        total = total * fall + tl.sum(weights, 1)
        out = out * fall[:, None] + tl.dot(weights.to(v.dtype), v)
        peak = new
    return peak, total, out


@triton.jit
def _attend_kernel(
    q_ptr, prompt_keys, prompt_values, own_keys, own_values, order_ptr, lengths_ptr, columns_ptr,
    parts_ptr, peaks_ptr, totals_ptr,
    slots, queries, kv_heads,
    pk_head, pk_group, pk_token, pv_head, pv_group, pv_token, ok_row, ok_head, ok_token, ov_row, ov_head, ov_token,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, maximum and sum of one split of the keys, for one sequence and key/value head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    group = (tl.load(order_ptr + sequence) // slots).to(tl.int64)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    stop = tl.load(columns_ptr + sequence).to(tl.int32) + 1
    row, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    at = (sequence * kv_heads + head) * queries
    asked = row < queries
    q = tl.load(q_ptr + (at + row)[:, None] * DIM + dims[None, :], mask=asked[:, None], other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    share = tl.cdiv(tl.cdiv(length, SIZE), SPLITS) * SIZE
    peak, total, out = _step(
        q, prompt_keys + head * pk_head + group * pk_group, prompt_values + head * pv_head + group * pv_group,
        pk_token, pv_token, split * share, tl.minimum(length, (split + 1) * share), peak, total, out, DIM, SIZE,
    )  # fmt: skip
    share = tl.cdiv(tl.cdiv(stop, SIZE), SPLITS) * SIZE
    peak, total, out = _step(
        q, own_keys + sequence * ok_row + head * ok_head, own_values + sequence * ov_row + head * ov_head,
        ok_token, ov_token, split * share, tl.minimum(stop, (split + 1) * share), peak, total, out, DIM, SIZE,
    )  # fmt: skip
    place = (at + row) * SPLITS + split
    tl.store(parts_ptr + place[:, None] * DIM + dims[None, :], out, mask=asked[:, None])
    tl.store(peaks_ptr + place, peak, mask=asked)
    tl.store(totals_ptr + place, total, mask=asked)


@triton.jit
def _sum_kernel(
    parts_ptr, peaks_ptr, totals_ptr, out_ptr, splits, SPLITS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Normalised output of one query from its splits."""
    query = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    inside = split < splits
    place = query * splits + split
    peaks = tl.load(peaks_ptr + place, mask=inside, other=-1e30)
    totals = tl.load(totals_ptr + place, mask=inside, other=0.0)
    parts = tl.load(parts_ptr + place[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
    fall = tl.exp(peaks - tl.max(peaks, 0))
    out = tl.sum(parts * fall[:, None], 0) / tl.sum(totals * fall, 0)
    tl.store(out_ptr + query * DIM + dims, out.to(out_ptr.dtype.element_ty))


@functools.cache
def decode_kernel_works(kv_heads: int, queries: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernels compile for these shapes and agree with torch; tried once for each."""
    if dtype.itemsize != 2 or dim < 16 or dim & (dim - 1):
        return False
    try:
        gap = disagreement(kv_heads, queries, dim, dtype, device)
        if gap <= TOLERANCE:
            return True
        reason = f"it differs from torch's operations by {gap:.2g}"
    except torch.OutOfMemoryError:
        raise  # not the kernel's fault
    except Exception as error:  # compilers, drivers and GPUs fail in many ways
        reason = f"{type(error).__name__}: {error}"
    warn(f"The kernel of decoding's attention is not used ({reason}); torch's operations are.")
    return False


def disagreement(kv_heads: int, queries: int, dim: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference from a softmax in float32 on random sequences of different lengths."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    size, width, columns, last = 3, 150, 400, (330, 1, 230)
    query = random(size, kv_heads, queries, dim) * dim**-0.5
    prompt = random(kv_heads, 2, width, dim), random(kv_heads, 2, width, dim)
    own = random(size, kv_heads, columns, dim), random(size, kv_heads, columns, dim)
    slot_map = SlotMap.of([0, 0, 1], [150, 70], width, size, 2, device)
    out = decode_attention(query, prompt, own, slot_map, torch.tensor(last, device=device))
    gaps = []
    for i, group in enumerate((0, 0, 1)):
        of_prompt, of_own = slice(int(slot_map.lengths[i])), slice(last[i] + 1)
        keys, values = (
            torch.cat([of_group[:, group, of_prompt], of_row[i, :, of_own]], dim=1).float()
            for of_group, of_row in zip(prompt, own, strict=True)
        )
        expected = (query[i].float() @ keys.mT).softmax(-1) @ values
        gaps.append((out[i].float() - expected).abs().max())
    return torch.stack(gaps).max().item()


def decode_attention(
    query: Tensor, prompt: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], slot_map: SlotMap, columns: Tensor
) -> Tensor:
    """Attend with one query per sequence to the prompt of its group and to its own tokens up to its entry of `columns`.

    Scaled queries [S, kv_heads, q, D] in half precision, keys and values of prompts [kv_heads, groups, width, D] and of
    own tokens [S, kv_heads, columns, D] -> [S, kv_heads, q, D].
    """
    size, kv_heads, queries, dim = query.shape
    keys = prompt[0].shape[2] + own[0].shape[2]
    splits = max(1, min(triton.cdiv(PROGRAMS, size * kv_heads), triton.cdiv(keys, LEAST_KEYS)))
    parts = torch.empty(size, kv_heads, queries, splits, dim, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, *parts.shape[:-1], dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):
        _attend_kernel[(size, kv_heads, splits)](
            query.contiguous(), *prompt, *own, slot_map.order, slot_map.lengths, columns,
            parts, peaks, totals, slot_map.slots, queries, kv_heads,
            *prompt[0].stride()[:3], *prompt[1].stride()[:3], *own[0].stride()[:3], *own[1].stride()[:3],
            SPLITS=splits, ROWS=max(16, triton.next_power_of_2(queries)), DIM=dim, SIZE=BLOCK,
        )  # fmt: skip
        _sum_kernel[(size * kv_heads * queries,)](
            parts, peaks, totals, out, splits, SPLITS=triton.next_power_of_2(splits), DIM=dim
        )
    return out
