"""Attention of a token tree as a few rectangles merged by log-sum-exp: exact, and nothing quadratic is kept.

A softmax over the union of key sets A and B is the average of the softmaxes over A and over B, weighted by their shares
`exp(lse_A - lse)` and `exp(lse_B - lse)` of the normaliser (as in FlashAttention, arXiv 2205.14135 §3.1, and Hydragen,
arXiv 2402.05099 §3.1). Its gradient with respect to the scores of A needs the merged output o and normaliser alone:
`dS = P * (dO V^T - rowsum(dO * o))`, `P = exp(S - lse)`. So the backward pass hands each rectangle the merged o and
lse, and no gradient ever flows through a log-sum-exp.
"""

from typing import Any

import torch
from torch import Tensor

from covey.policy.attention.kernels import Explicit, FlashCPU, Kernel
from covey.policy.attention.tree import Part, TokenTree


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
    """Attention within a token tree, on any device.

    Args:
        query: [1, heads, T, D]; key: [1, kv_heads, T, D]; value: [1, kv_heads, T, D'].
        tree: who sees whom.
        scale: multiplies the scores.
        window: how far back a token sees, or None for everything.
        cap: soft-capping of the scores, or None.
        sinks: [heads], a score of each head that takes its share of the softmax and gives nothing, or None.
        dropout: the share of attention weights dropped.

    Returns:
        [1, T, heads, D'].
    """
    plain = cap is None and not dropout and query.shape[-1] == value.shape[-1]
    kernel: Kernel = FlashCPU(scale) if plain and query.device.type == "cpu" else Explicit(scale, cap, dropout)
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
        kernel: Kernel,
    ) -> Tensor:
        q, k, v = _by_head(query, key, value)
        kv_heads, repeats, tokens, _ = q.shape
        own, ancestors = tree.parts(window)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        result = lse.new_empty(1, tokens, kv_heads * repeats, v.shape[-1])
        out = _grouped(result, kv_heads)
        with torch.autocast(query.device.type, enabled=False):
            for part in own:
                out[:, :, part.queries], lse[:, :, part.queries] = _run(kernel, part, q, k, v)
            for part in ancestors:
                _merge(out[:, :, part.queries], lse[:, :, part.queries], *_run(kernel, part, q, k, v))
        if sinks is not None:
            given = sinks.to(lse.dtype).view(kv_heads, repeats, 1).expand_as(lse)
            _merge(out, lse, out.new_zeros(()), given)
        result = result.to(value.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.parts, ctx.kernel = tree.parts(window), kernel
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, lse = ctx.saved_tensors
        q, k, v = _by_head(query, key, value)
        kv_heads, repeats, _, _ = q.shape
        grad, out = _grouped(grads[0], kv_heads), _grouped(result, kv_heads)
        own, ancestors = ctx.parts
        # Own rectangles that are squares cover everything once, so they may be written rather than added.
        once = all(part.causal for part in own)
        fresh = torch.empty if once else torch.zeros
        # Sums over rectangles are taken in float32 at least.
        totals = [fresh(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        with torch.autocast(query.device.type, enabled=False):
            for place, part in enumerate([*own, *ancestors]):
                at, of = part.queries, part.keys
                pieces = ctx.kernel.backward(
                    part, grad[:, :, at], q[:, :, at], k[:, :, of], v[:, :, of], out[:, :, at], lse[:, :, at]
                )
                for total, span, piece in zip(totals, (at, of, of), pieces, strict=True):
                    if once and place < len(own):
                        total[:, :, span] = piece
                    else:
                        total[:, :, span] += piece
        d_q, d_k, d_v = totals
        d_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype).view(kv_heads, repeats, 1) - lse)
            d_sinks = -(share * (grad * out).sum(-1)).sum(-1).view(-1).to(sinks.dtype)
        d_key, d_value = (d[:, 0][None].to(x.dtype) for d, x in ((d_k, key), (d_v, value)))
        return d_q.flatten(0, 1)[None].to(query.dtype), d_key, d_value, d_sinks, None, None, None


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, T, D] twice and values -> [kv_heads, repeats, T, D], [kv_heads, 1, T, D], [kv_heads, 1, T, D']."""
    return query[0].unflatten(0, (key.shape[1], -1)), key[0][:, None], value[0][:, None]


def _grouped(rows: Tensor, kv_heads: int) -> Tensor:
    """A view of [1, T, heads, D] as [kv_heads, repeats, T, D]."""
    return rows[0].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _run(kernel: Kernel, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return kernel.forward(part, q[:, :, part.queries], k[:, :, part.keys], v[:, :, part.keys])


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Take further keys into a softmax, in place: exp(other_lse - total) is the others' share."""
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.lerp_(other_out.to(out.dtype).expand_as(out), share)
    torch.logaddexp(lse, other_lse, out=lse)
