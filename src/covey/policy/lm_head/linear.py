"""Scores of tokens under a plain linear head, without their logits ever being there all at once.

One autograd function takes hidden states, weight and bias to log-probs and entropies. It walks over tiles of tokens by
vocabulary: forward keeps a few numbers per token, backward multiplies each tile out again and turns it into its share
of the gradients where it lies. Both together are four matrix products (forward, again in backward, by hidden, by
weight).

Memory beyond inputs, results and the weight's gradient, however many tokens and words there are: `TILE_BYTES` for each
of one to five tiles (one in float32; more with half precision, entropies, soft-capping, a bias), a tile's rows of the
weight where its type is changed, and a few [N, H] in float32.

Not here: heads that are more than a linear layer (lm_head.py), arithmetic within a tile (lm_head_tiles.py).

Letters: N tokens, H hidden size, V vocabulary; n and v those of a tile.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.policy.lm_head.torch_tiles import Curve, Places, RowGradients, RowSums, TorchTiles

TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
"""Bytes of a tile's logits in float32. On a CPU a tile that stays in the cache is fastest, and small allocations are
reused; a GPU wants large products."""


class Plan(NamedTuple):
    """How one call is computed.

    Attributes:
        curve: from products to logits.
        entropy: entropies are wanted.
        compute: the type that matrices are multiplied in.
        wide: float32 or wider, the type of sums.
        tokens: n, the most tokens in a tile.
        words: v, the most vocabulary entries in a tile.
        usual: n and v of a call with many tokens, by which arithmetic is chosen; the same in every call.
        foresee: work out the hidden states' gradient in the forward pass; see `LinearHead`.
    """

    curve: Curve
    entropy: bool
    compute: torch.dtype
    wide: torch.dtype
    tokens: int
    words: int
    usual: tuple[int, int]
    foresee: bool


class Tile(NamedTuple):
    """Where a tile lies: tokens `first` to `last`, and x = gain * (hidden @ weight.T + bias) of it, [n, v]."""

    first: int
    last: int
    x: Tensor
    places: Places


def plan_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    curve: Curve,
    *,
    entropy: bool,
    compute: torch.dtype,
    chunk_size: int,
) -> Plan:
    """Tile sizes and types for hidden [N, H], weight [V, H] and bias [V].

    Args:
        compute: the type that matrices are multiplied in.
        chunk_size: the most tokens in a tile.
    """
    wide = torch.promote_types(compute, torch.float32)
    room = TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"]) // wide.itemsize
    tokens = max(1, min(chunk_size, len(hidden)))
    words, usual = (max(1, min(room // each, len(weight))) for each in (tokens, chunk_size))
    # The gradient of a frozen head's input is known after one pass, unless an entropy may be differentiated.
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    foresee = torch.is_grad_enabled() and hidden.requires_grad and frozen and not entropy and curve.cap is None
    return Plan(curve, entropy, compute, wide, tokens, words, (chunk_size, usual), foresee)


class LinearHead(torch.autograd.Function):
    """log p(target) and H(p) with p = softmax(curve(hidden @ weight.T + bias)).

    With z the logits and g the incoming gradients, dz = g_logp (1[y] - p) - g_H p (log p + H); then
    d hidden = dz @ weight and d weight = dz.T @ hidden. A row's common factor is applied to the [N, H] matrices rather
    than to the tiles.

    A frozen head (an adapter elsewhere) needs two products instead of three: d log p_y / d hidden is weight_y less the
    mean of weight_v under p, and one pass computes such a mean as attention does. The target's own term is kept
    apart as (1 - p_y) weight_y, so that nothing cancels where p_y is nearly 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [N, H], weight [V, H], bias [V], targets [N] int64 -> log-probs [N], entropies [N] or None."""
        with torch.autocast(hidden.device.type, enabled=False):
            walk = _Walk(hidden, weight, bias, targets, plan)
            sums, others = walk.sums()
        logprobs, entropies = sums.logprobs(), sums.entropies()
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, sums.log_z(), logprobs, entropies, others)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, each in its own type."""
        hidden, weight, bias, targets, log_z, logprobs, entropies, others = ctx.saved_tensors
        rows = RowGradients.of(log_z, logprobs, entropies, *grads)
        if others is not None:
            own = weight[targets].to(log_z.dtype).mul_(-torch.expm1(logprobs)[:, None])
            d_hidden = own.sub_(others).mul_((rows.by_logprob * ctx.plan.curve.gain)[:, None])
            return d_hidden.to(hidden.dtype), None, None, None, None
        with torch.autocast(hidden.device.type, enabled=False):
            walk = _Walk(hidden, weight, bias, targets, ctx.plan)
            return *walk.gradients(rows, ctx.needs_input_grad), None, None


class _Walk:
    """The tiles of one pass, vocabulary outermost: a slice of the weight is used for all tokens before the next."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan):
        self.hidden, self.weight, self.bias, self.targets, self.plan = hidden, weight, bias, targets, plan
        self.inputs = hidden.to(plan.compute)
        room = plan.tokens * plan.words
        self.buffer = torch.empty(room, dtype=plan.compute, device=hidden.device)
        self.arithmetic = _arithmetic_for(plan, hidden.device)(
            plan.curve, minus_inf=bias is not None, room=room, wide=plan.wide, device=hidden.device
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Iterator[Tile]]]:
        """Slices of the weight [v, H] with the tiles that they give."""
        for start in range(0, len(self.weight), self.plan.words):
            words = self.weight[start : start + self.plan.words].to(self.plan.compute)
            yield words, self._tiles(start, words)

    def _tiles(self, start: int, words: Tensor) -> Iterator[Tile]:
        gain = self.plan.curve.gain
        bias = None if self.bias is None else self.bias[start : start + len(words)].to(self.plan.compute)
        for first in range(0, len(self.inputs), self.plan.tokens):
            inputs = self.inputs[first : first + self.plan.tokens]
            last = first + len(inputs)
            x = self.buffer[: len(inputs) * len(words)].view(len(inputs), len(words))
            if bias is None:
                torch.addmm(x, inputs, words.T, beta=0, alpha=gain, out=x)
            else:
                torch.addmm(bias, inputs, words.T, beta=gain, alpha=gain, out=x)
            yield Tile(first, last, x, Places.of(self.targets[first:last], start, len(words)))

    def sums(self) -> tuple[RowSums, Tensor | None]:
        """Of each row's softmax, and sum_v p_v weight_v over all but the target, [N, H], if the plan foresees."""
        plan = self.plan
        sums = RowSums.before_any(len(self.hidden), self.hidden.new_empty(0, dtype=plan.wide), plan.entropy)
        others = self._hidden_zeros() if plan.foresee else None
        for words, tiles in self:
            for tile in tiles:
                part = slice(tile.first, tile.last)
                added = self.arithmetic.add(tile.x, tile.places, sums.rows(tile.first, tile.last), others=plan.foresee)
                if others is not None and added is not None:
                    weights, shrink = added
                    others[part].mul_(shrink[:, None])
                    _add_product(others[part], weights.to(plan.compute), words)
        return sums, None if others is None else others.div_(sums.total[:, None])

    def gradients(
        self, rows: RowGradients, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden, weight and bias: None for those not needed."""
        wide = self.plan.wide
        factor = (rows.factor() * self.plan.curve.gain)[:, None]
        scaled = self.inputs.to(wide).mul(factor).to(self.plan.compute)
        d_hidden = self._hidden_zeros() if needed[0] else None
        make = torch.empty_like if len(self.hidden) else torch.zeros_like
        d_weight = make(self.weight) if needed[1] else None
        d_bias = torch.zeros_like(self.bias, dtype=wide) if needed[2] and self.bias is not None else None
        start = 0
        for words, tiles in self:
            stop = start + len(words)
            # A slice is summed over its tiles in the wide type: in place, where the gradient has that.
            mine = None if d_weight is None else d_weight[start:stop]
            sums = mine if mine is None or mine.dtype == wide else torch.empty_like(mine, dtype=wide)
            for tile in tiles:
                part = slice(tile.first, tile.last)
                grad = self.arithmetic.gradient(tile.x, tile.places, rows.rows(tile.first, tile.last))
                if d_hidden is not None:
                    _add_product(d_hidden[part], grad, words)
                if sums is not None:
                    _add_product(sums, grad.T, scaled[part], start=tile.first == 0)
                if d_bias is not None:
                    d_bias[start:stop].add_(grad.T.to(wide) @ factor[part, 0])
            if mine is not None and sums is not None and sums is not mine and len(self.hidden):
                mine.copy_(sums)
            start = stop
        if d_hidden is not None:
            d_hidden = d_hidden.mul_(factor).to(self.hidden.dtype)
        return d_hidden, d_weight, d_bias if self.bias is None or d_bias is None else d_bias.to(self.bias.dtype)

    def _hidden_zeros(self) -> Tensor:
        """[N, H] in the wide type."""
        return torch.zeros_like(self.hidden, dtype=self.plan.wide)


def _arithmetic_for(plan: Plan, device: torch.device) -> type[TorchTiles]:
    """On CUDA, Triton kernels where they are there, right and fast."""
    if device.type != "cuda" or plan.wide != torch.float32 or find_spec("triton") is None:
        return TorchTiles
    from covey.policy.lm_head.triton_tiles import fastest_tiles

    return fastest_tiles(plan.usual, plan.compute, plan.curve, plan.entropy, device)


def _add_product(sums: Tensor, a: Tensor, b: Tensor, *, start: bool = False) -> None:
    """sums += a @ b (or = where the sums start here), adding in the sums' type."""
    if a.dtype == sums.dtype:
        torch.addmm(sums, a, b, beta=0 if start else 1, out=sums)
    elif start:
        sums.copy_(a @ b)
    else:
        sums.add_(a @ b)
