"""Attention over one rectangle of queries and keys, forward and backward, in a form that can be merged.

A kernel's forward gives the softmax over its keys alone and its log-sum-exp; its backward takes the output and
log-sum-exp of the *whole* row of the softmax. Two kernels: torch's flash attention for the CPU, and an explicit one
that knows soft-capping and dropout. A further one is a class with these two methods.

Shapes: H key heads, R query heads for each of them, Q queries, K keys, D features (values may have another number).
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from covey.policy.attention.tree import Part

SCORES_AT_ONCE = 1 << 22
"""Elements of the score matrix that the explicit kernel holds."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kernel(Protocol):
    """What `merged.py` needs of a kernel."""

    def forward(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """query [H, R, Q, D], key [H, 1, K, D], value [H, 1, K, D'] -> output [H, R, Q, D'], log-sum-exp [H, R, Q]."""

    def backward(
        self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query [H, R, Q, D], key [H, 1, K, D] and value [H, 1, K, D'].

        grad, out [H, R, Q, D'] and lse [H, R, Q] belong to the softmax over all keys, these and others.
        """


class FlashCPU:
    """Torch's flash attention on the CPU. Key heads are shared by a stride of zero, never copied."""

    def __init__(self, scale: float):
        self.scale = scale

    def forward(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
        return _flash(query, key, value, 0.0, part.causal, attn_mask=_additive(part, query), scale=self.scale)

    def backward(
        self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
        mask = _additive(part, query)
        d_query, d_key, d_value = _flash_backward(
            grad, query, key, value, out, lse, 0.0, part.causal, attn_mask=mask, scale=self.scale
        )
        return d_query, d_key.sum(1, keepdim=True), d_value.sum(1, keepdim=True)


class Explicit:
    """Scores written out, a block of queries at a time, in float32 at least; nothing quadratic is kept for backward.

    With cap c, scores are c tanh(s / c), whose derivative is 1 - (capped / c)^2.
    """

    def __init__(self, scale: float, cap: float | None = None, dropout: float = 0.0):
        self.scale = scale
        self.cap = cap
        self.dropout = dropout
        self.seed = int(torch.randint(2**62, ())) if dropout else 0

    def forward(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = key.to(wide), value.to(wide)
        out, lse = [], []
        chance = self._chance(part, query.device)
        for rows in _blocks(query, key):
            scores = self._scores(part, rows, query[:, :, rows].to(wide), key)
            total = scores.logsumexp(-1)
            weights = self._drop(scores.sub_(total[..., None]).exp_(), chance)
            out.append(weights @ value)
            lse.append(total)
        return torch.cat(out, dim=2), torch.cat(lse, dim=2)

    def backward(
        self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = key.to(wide), value.to(wide)
        d_query = []
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        chance = self._chance(part, query.device)
        for rows in _blocks(query, key):
            q, g = query[:, :, rows].to(wide), grad[:, :, rows].to(wide)
            scores = self._scores(part, rows, q, key)
            slope = None if self.cap is None else 1 - (scores / self.cap).square_().nan_to_num_(posinf=1.0)
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            # One set of dropped weights for both products.
            kept = self._drop(torch.ones_like(weights), chance) if self.dropout else None
            d_weights = g @ value.mT
            if kept is not None:
                d_weights.mul_(kept)
            d_scores = d_weights.sub_((g * out[:, :, rows].to(wide)).sum(-1, keepdim=True)).mul_(weights)
            if slope is not None:
                d_scores.mul_(slope)
            d_scores.mul_(self.scale)
            d_query.append(d_scores @ key)
            d_key += (d_scores.mT @ q).sum(1, keepdim=True)
            d_value += ((weights if kept is None else weights * kept).mT @ g).sum(1, keepdim=True)
        return torch.cat(d_query, dim=2), d_key, d_value

    def _scores(self, part: Part, rows: slice, query: Tensor, key: Tensor) -> Tensor:
        """[H, R, rows, K], capped and masked."""
        scores = (query @ key.mT).mul_(self.scale)
        if self.cap is not None:
            scores = scores.div_(self.cap).tanh_().mul_(self.cap)
        visible = part.visible(query.device)
        return scores if visible is None else scores.masked_fill_(~visible[rows], -torch.inf)

    def _chance(self, part: Part, device: torch.device) -> torch.Generator | None:
        """The same draws in backward as in forward."""
        if not self.dropout:
            return None
        return torch.Generator(device).manual_seed(hash((self.seed, part.queries.start, part.keys.start)) % 2**62)

    def _drop(self, weights: Tensor, chance: torch.Generator | None) -> Tensor:
        if chance is None:
            return weights
        drawn = torch.rand(weights.shape, generator=chance, device=weights.device)
        return weights.mul_((drawn >= self.dropout).to(weights.dtype).div_(1 - self.dropout))


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Ranges of queries whose scores stay within `SCORES_AT_ONCE`."""
    heads, repeats, queries, _ = query.shape
    rows = max(16, SCORES_AT_ONCE // (heads * repeats * key.shape[2]))
    return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))


def _additive(part: Part, query: Tensor) -> Tensor | None:
    """The mask as flash attention wants it; None where `causal` or nothing says it all."""
    if part.band is None:
        return None
    hidden = ~part.visible(query.device)  # type: ignore[operator]  # a band always has a mask
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
