"""Attention within a token tree, on any device, as a few rectangles merged by log-sum-exp.

A `TokenTree` describes visibility between the tokens of one row: a forest of segments in depth-first order, each
attending to itself and to its ancestors. Query q sees key k exactly if `k <= q < reach[k]` and, in a window,
`position[q] - position[k] < window`. Packed sequences are roots without children; completions that share a prompt are
the children of the prompt's segment.

`merged_attention` is exact, and saves no matrix of scores for the backward pass. A softmax over the union of key sets A
and B is the average of the softmaxes over A and over B, weighted by their shares `exp(lse_A - lse)` and
`exp(lse_B - lse)` of the normaliser (FlashAttention, arXiv 2205.14135 §3.1; Hydragen, arXiv 2402.05099 §3.1). The
gradient with respect to the scores of A needs only the merged output o and the normaliser: `dS = P * (dO V^T -
rowsum(dO * o))`, `P = exp(S - lse)`. So no gradient flows through a log-sum-exp. See also `flex.py` (CUDA).

Shapes: H key heads, R query heads for each of them, Q queries, K keys, D features (values may have another number, D').
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

CAUSAL_BLOCK = 128  # most tokens of a square on the diagonal; half of the square is computed and masked
BAND_BLOCK = 256  # most queries of a part with a sliding window, whose mask is [256, 256 + window] at most


class Part(NamedTuple):
    """A rectangle of the row's attention matrix in which every query sees at least one key.

    Query i of the part sees its key j if `0 <= i + shift - j < window`.
    """

    queries: slice  # ranges of the row
    keys: slice
    causal: bool = False  # exactly the lower triangle is visible; the part is square
    band: tuple[int, int] | None = None  # (shift, window) where a sliding window cuts, or None

    def visible(self, device: torch.device) -> Tensor | None:
        """[queries, keys] bool, or None where every query sees every key."""
        rows, columns = (span.stop - span.start for span in (self.queries, self.keys))
        if self.causal:
            return torch.ones(rows, columns, dtype=torch.bool, device=device).tril_()
        if self.band is None:
            return None
        shift, window = self.band
        back = torch.arange(shift, shift + rows, device=device)[:, None] - torch.arange(columns, device=device)
        return (back >= 0) & (back < window)


class TokenTree:
    """The segments of a row; a plain class, so that wrappers that move or cast tensors leave it alone.

    Example:
        A prompt of 3 tokens with completions of 2 and 4: `TokenTree([3, 2, 4], [-1, 0, 0])`.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]):
        """Lengths [S] >= 1 and parents [S] in depth-first order: a parent before its children, families together."""
        self.parents = list(parents)  # the segment that each continues, or -1
        self.stops = list(accumulate(lengths))  # each segment's range of the row
        self.starts = list(map(sub, self.stops, lengths))
        self.size = self.stops[-1] if self.stops else 0
        self.offsets: list[int] = []  # the position of each segment's first token in its sequence
        for parent in parents:
            self.offsets.append(0 if parent < 0 else self.offsets[parent] + lengths[parent])
        self.reaches = list(self.stops)  # end of the descendants of each segment
        for segment in reversed(range(len(self.parents))):
            parent = self.parents[segment]
            if parent >= 0:
                self.reaches[parent] = max(self.reaches[parent], self.reaches[segment])
        self.cache: dict[Any, Any] = {}
        """Values that attention derives from the tree once per forward pass, by name and arguments."""

    def positions(self) -> Tensor:
        """Position of each token in its sequence, [T] int64 on the CPU."""
        spans = zip(self.offsets, self.starts, self.stops, strict=True)
        return torch.cat([torch.arange(offset, offset + stop - start) for offset, start, stop in spans])

    def reach(self) -> Tensor:
        """End of the queries that may see each token, [T] int64 on the CPU."""
        lengths = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        return torch.tensor(self.reaches).repeat_interleave(torch.tensor(lengths))

    def parts(self, window: int | None) -> tuple[list[Part], list[Part]]:
        """The visible pairs as few large rectangles, without a mask where a whole segment is visible; cached by window.

        The first list has the parts on the diagonal, whose queries cover the row exactly once; the second has the parts
        with keys of ancestors.
        """
        key = ("parts", window)
        if key in self.cache:
            return self.cache[key]
        own: list[Part] = []
        earlier: list[Part] = []
        for segment, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            if window is None or stop - start <= window:
                for first in range(start, stop, CAUSAL_BLOCK):
                    block = slice(first, min(first + CAUSAL_BLOCK, stop))
                    own.append(Part(block, block, causal=True))
                    if first > start:
                        earlier.append(Part(block, slice(start, first)))
            else:
                own += self._banded(segment, segment, window)
            reach = self.reaches[segment]
            if reach == stop:
                continue
            if window is not None:
                children = range(segment + 1, bisect_left(self.starts, reach))
                end = max(self.offsets[c] + self.stops[c] - self.starts[c] for c in children)
                if end - self.offsets[segment] > window:
                    for child in children:
                        earlier += self._banded(child, segment, window)
                    continue
            earlier.append(Part(slice(stop, reach), slice(start, stop)))
        self.cache[key] = own, earlier
        return self.cache[key]

    def _banded(self, segment: int, ancestor: int, window: int) -> list[Part]:
        """Attention of a segment to an ancestor or itself, in blocks of queries with only the keys in their window."""
        parts = []
        gap = self.offsets[segment] - self.offsets[ancestor]
        keys = self.stops[ancestor] - self.starts[ancestor]
        for first in range(0, self.stops[segment] - self.starts[segment], BAND_BLOCK):
            last = min(first + BAND_BLOCK, self.stops[segment] - self.starts[segment])
            # Query i sees keys from i + gap - window + 1 to i + gap; from some query on, none of this ancestor.
            last = min(last, keys - 1 + window - gap)
            if last <= first:
                break
            low, high = max(0, first + gap - window + 1), min(keys, last + gap)
            at, base = self.starts[segment], self.starts[ancestor]
            band = (first + gap - low, window)
            parts.append(Part(slice(at + first, at + last), slice(base + low, base + high), band=band))
        return parts


SCORES_AT_ONCE = 1 << 22  # most elements of the score matrix that the explicit kernel holds

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlashCPU(NamedTuple):
    """Torch's flash attention on the CPU; query heads share a key head by a stride of 0, without a copy."""

    scale: float

    def forward(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax over the part's keys alone, [H, R, Q, D'], and its log-sum-exp [H, R, Q]."""
        repeats = query.shape[1]
        key, value = key.expand(-1, repeats, -1, -1), value.expand(-1, repeats, -1, -1)
        return _flash(query, key, value, 0.0, part.causal, attn_mask=_additive(part, query), scale=self.scale)

    def backward(
        self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key [H, 1, K, D] and value; grad, out and lse are those of the softmax over all keys."""
        repeats = query.shape[1]
        key, value = key.expand(-1, repeats, -1, -1), value.expand(-1, repeats, -1, -1)
        mask = _additive(part, query)
        d_query, d_key, d_value = _flash_backward(
            grad, query, key, value, out, lse, 0.0, part.causal, attn_mask=mask, scale=self.scale
        )
        return d_query, d_key.sum(1, keepdim=True), d_value.sum(1, keepdim=True)


class Explicit:
    """Explicit scores, a block of queries at a time, in float32 or wider; scores are not saved for backward.

    With cap c, scores are c tanh(s / c), whose derivative is 1 - (capped / c)^2.
    """

    def __init__(self, scale: float, cap: float | None = None, dropout: float = 0.0):
        self.scale = scale
        self.cap = cap
        self.dropout = dropout
        self.seed = int(torch.randint(2**62, ())) if dropout else 0

    def forward(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = key.to(wide), value.to(wide)
        out, lse = [], []
        generator = self._generator(part, query.device)
        for rows in _blocks(query, key):
            scores = self._scores(part, rows, query[:, :, rows].to(wide), key)
            total = scores.logsumexp(-1)
            weights = self._drop(scores.sub_(total[..., None]).exp_(), generator)
            out.append(weights @ value)
            lse.append(total)
        return torch.cat(out, dim=2), torch.cat(lse, dim=2)

    def backward(
        self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = key.to(wide), value.to(wide)
        d_query = []
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        generator = self._generator(part, query.device)
        for rows in _blocks(query, key):
            q, g = query[:, :, rows].to(wide), grad[:, :, rows].to(wide)
            scores = self._scores(part, rows, q, key)
            slope = None if self.cap is None else 1 - (scores / self.cap).square_().nan_to_num_(posinf=1.0)
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            dropout_mask = self._drop(torch.ones_like(weights), generator) if self.dropout else None
            d_weights = g @ value.mT
            if dropout_mask is not None:
                d_weights.mul_(dropout_mask)
            d_scores = d_weights.sub_((g * out[:, :, rows].to(wide)).sum(-1, keepdim=True)).mul_(weights)
            if slope is not None:
                d_scores.mul_(slope)
            d_scores.mul_(self.scale)
            d_query.append(d_scores @ key)
            d_key += (d_scores.mT @ q).sum(1, keepdim=True)
            d_value += ((weights if dropout_mask is None else weights * dropout_mask).mT @ g).sum(1, keepdim=True)
        return torch.cat(d_query, dim=2), d_key, d_value

    def _scores(self, part: Part, rows: slice, query: Tensor, key: Tensor) -> Tensor:
        """[H, R, rows, K], capped and masked."""
        scores = (query @ key.mT).mul_(self.scale)
        if self.cap is not None:
            scores = scores.div_(self.cap).tanh_().mul_(self.cap)
        visible = part.visible(query.device)
        return scores if visible is None else scores.masked_fill_(~visible[rows], -torch.inf)

    def _generator(self, part: Part, device: torch.device) -> torch.Generator | None:
        """Generator with the same seed in forward and backward; None without dropout."""
        if not self.dropout:
            return None
        return torch.Generator(device).manual_seed(hash((self.seed, part.queries.start, part.keys.start)) % 2**62)

    def _drop(self, weights: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return weights
        random = torch.rand(weights.shape, generator=generator, device=weights.device)
        return weights.mul_((random >= self.dropout).to(weights.dtype).div_(1 - self.dropout))


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Ranges of queries whose scores have at most `SCORES_AT_ONCE` elements."""
    heads, repeats, queries, _ = query.shape
    rows = max(16, SCORES_AT_ONCE // (heads * repeats * key.shape[2]))
    return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))


def _additive(part: Part, query: Tensor) -> Tensor | None:
    """Additive mask for flash attention; None where `causal` suffices or nothing is hidden."""
    if part.band is None:
        return None
    hidden = ~part.visible(query.device)  # type: ignore[operator]  # a band always has a mask
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TokenTree,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention within a token tree, [1, T, heads, D'].

    query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, D']. A token sees `window` tokens back
    (None: all); `sinks` [heads] take probability and have no value; `cap` soft-caps scores times `scale`.
    """
    plain = cap is None and not dropout and query.shape[-1] == value.shape[-1]
    kernel = FlashCPU(scale) if plain and query.device.type == "cpu" else Explicit(scale, cap, dropout)
    return _Merged.apply(query, key, value, sinks, tree, window, kernel)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tree: TokenTree,
        window: int | None,
        kernel: FlashCPU | Explicit,
    ) -> Tensor:
        q, k, v = _by_head(query, key, value)
        kv_heads, repeats, tokens, _ = q.shape
        own, earlier = tree.parts(window)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        result = lse.new_empty(1, tokens, kv_heads * repeats, v.shape[-1])
        out = _grouped(result, kv_heads)
        with torch.autocast(query.device.type, enabled=False):
            for index, part in enumerate([*own, *earlier]):
                at, of = part.queries, part.keys
                result_of_part = kernel.forward(part, q[:, :, at], k[:, :, of], v[:, :, of])
                if index < len(own):
                    out[:, :, at], lse[:, :, at] = result_of_part
                else:
                    _merge(out[:, :, at], lse[:, :, at], *result_of_part)
        if sinks is not None:
            sink_lse = sinks.to(lse.dtype).view(kv_heads, repeats, 1).expand_as(lse)
            _merge(out, lse, out.new_zeros(()), sink_lse)
        result = result.to(value.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.parts, ctx.kernel = (own, earlier), kernel
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, lse = ctx.saved_tensors
        q, k, v = _by_head(query, key, value)
        kv_heads, repeats, _, _ = q.shape
        grad, out = _grouped(grads[0], kv_heads), _grouped(result, kv_heads)
        own, earlier = ctx.parts
        # Squares on the diagonal cover everything once, so they may be written rather than added.
        squares = all(map(attrgetter("causal"), own))
        new = partial(torch.empty if squares else torch.zeros, dtype=lse.dtype, device=lse.device)
        d_q, d_k, d_v = totals = new(q.shape), new(k.shape), new(v.shape)  # sums in float32 at least
        with torch.autocast(query.device.type, enabled=False):
            for index, part in enumerate([*own, *earlier]):
                at, of = part.queries, part.keys
                gradients = ctx.kernel.backward(
                    part, grad[:, :, at], q[:, :, at], k[:, :, of], v[:, :, of], out[:, :, at], lse[:, :, at]
                )
                for total, span, gradient in zip(totals, (at, of, of), gradients, strict=True):
                    if squares and index < len(own):
                        total[:, :, span] = gradient
                    else:
                        total[:, :, span] += gradient
        d_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype).view(kv_heads, repeats, 1) - lse)
            d_sinks = -(share * (grad * out).sum(-1)).sum(-1).view(-1).to(sinks.dtype)
        d_query, d_key, d_value = d_q.flatten(0, 1)[None], d_k[:, 0][None], d_v[:, 0][None]
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None, None, None


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [kv_heads, repeats, T, D], [kv_heads, 1, T, D] and [kv_heads, 1, T, D'] of [1, heads, T, D]."""
    return query[0].unflatten(0, (key.shape[1], -1)), key[0][:, None], value[0][:, None]


def _grouped(rows: Tensor, kv_heads: int) -> Tensor:
    return rows[0].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Add further keys to a softmax, in place: exp(other_lse - total) is their share."""
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.lerp_(other_out.to(out.dtype).expand_as(out), share)
    torch.logaddexp(lse, other_lse, out=lse)
