"""Scores of tokens under a plain linear head, without all of their logits in memory.

One autograd function maps hidden states, weight and bias to log-probs and entropies, over tiles of tokens by
vocabulary: forward saves a few numbers per token, backward computes each tile's logits again, unless all of them fit
into `KEPT_BYTES`. Memory for any number of tokens and any vocabulary: `TILE_BYTES` for each of one to five tiles, cast
rows of the weight, and a few [N, H] in float32.

Letters: N tokens, H hidden size, V vocabulary entries, which are called words; n tokens and v words of a tile. C
targets of each token: the token itself, then the further tokens to score (`named`).
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.policy.lm_head.support import SampledSupport
from covey.policy.lm_head.teacher import DivergenceSums, TeacherRows
from covey.policy.lm_head.torch_tiles import (
    Curve,
    DivergenceGradients,
    RowGradients,
    RowSums,
    TargetColumns,
    TorchTiles,
)
from covey.policy.products import product

TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
"""Bytes of a tile's logits in float32: on CPUs, tiles that fit into the cache are fastest; GPUs need large products."""

KEPT_BYTES = {"cpu": 256 * 2**20}
"""Most bytes of exponentials, over all tiles, that forward keeps for backward: with them a step takes three products
with the head's weight instead of four."""


class HeadPlan(NamedTuple):
    """Tile sizes and dtypes of one call."""

    curve: Curve  # from products to logits
    entropy: bool  # also compute entropies
    compute: torch.dtype  # dtype of matrix products
    wide: torch.dtype  # float32 or wider, dtype of sums
    tokens: int  # n, most tokens in a tile
    words: int  # v, most vocabulary entries in a tile
    usual: tuple[int, int]  # n and v of a call with many tokens; the kernels are chosen by these, equally in every call
    gradient_in_forward: bool  # compute the hidden states' gradient in the forward pass; see `LinearHead`
    support: SampledSupport | None  # tokens that each token was drawn from; None: the whole vocabulary
    keeps: bool  # exponentials are kept for the backward pass
    top: int  # number of likeliest tokens to return
    teacher: TeacherRows | None = None  # for the divergence over the whole vocabulary, if it is wanted

    def of_whole_rows(self, words: int) -> "HeadPlan":
        """Tiles of the same size that span the whole vocabulary of few tokens, so that one tile gives a divergence."""
        tokens = max(1, min(self.tokens, self.tokens * self.words // words))
        return self._replace(tokens=tokens, words=words)


class Tile(NamedTuple):
    """Some tokens by some words: x = gain * (hidden @ weight.T + bias) [n, v], targets, and teachers' logits."""

    part: slice
    x: Tensor
    targets: TargetColumns
    teacher: Tensor | None = None


def plan_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    curve: Curve,
    *,
    entropy: bool,
    compute: torch.dtype,
    chunk_size: int,
    support: SampledSupport | None = None,
    top: int = 0,
    teacher: TeacherRows | None = None,
) -> HeadPlan:
    """Tile sizes and dtypes for hidden [N, H], weight [V, H] and bias [V]."""
    wide = torch.promote_types(compute, torch.float32)
    size = TILE_BYTES.get(hidden.device.type, TILE_BYTES["cuda"]) // wide.itemsize
    tokens = max(1, min(chunk_size, len(hidden)))
    words = max(1, min(size // tokens, len(weight)))
    usual = (chunk_size, max(1, min(size // chunk_size, len(weight))))
    # With a frozen head, forward can compute the gradient of its input, unless entropies may be differentiated.
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    straight = curve.cap is None and (support is None or support.penalty == 1.0)
    alone = straight and teacher is None
    in_forward = torch.is_grad_enabled() and hidden.requires_grad and frozen and not entropy and alone
    whole = alone and support is None and not entropy and compute == wide and tokens == len(hidden) and not frozen
    room = len(hidden) * len(weight) * wide.itemsize <= KEPT_BYTES.get(hidden.device.type, 0)
    keeps = torch.is_grad_enabled() and whole and room
    return HeadPlan(curve, entropy, compute, wide, tokens, words, usual, in_forward, support, keeps, top, teacher)


class LinearHead(torch.autograd.Function):
    """log p(targets), H(p) and the likeliest tokens, with p = softmax(curve(hidden @ weight.T + bias)).

    With z the logits and g the incoming gradients, dz = sum_y g_y (1[y] - p) - g_H p (log p + H), d hidden is
    dz @ weight and d weight is dz.T @ hidden. With a frozen head, forward computes sum_v p_v weight_v over the words
    that are not targets; adding the targets' rows of the weight then gives d hidden. Targets are added separately, so
    that nothing cancels if one of them has a probability near 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: HeadPlan
    ) -> tuple[Tensor | None, ...]:
        """hidden [N, H], weight [V, H], bias [V], targets [N, C] int64 -> log-probs [N] of the first targets, entropies
        [N] or None, log-probs [N, C - 1] of the others or None, the divergence [N] from `plan.teacher` or None, and
        `plan.top` tokens [N, top] with log-probs, or None.
        """
        ahead = plan if plan.teacher is None else plan.of_whole_rows(len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            sums, others, of_teacher, kept = _Tiles(hidden, weight, bias, targets, ahead).sums()
        log_z, logprobs, entropies = sums.results()
        ctx.plan, ctx.of_teacher = plan, of_teacher
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, logprobs, entropies, others, *kept)
        return outputs_of(ctx, logprobs, entropies, sums, of_teacher)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, logprobs, entropies, others, *kept = ctx.saved_tensors
        by_logprob, by_entropy, by_named, by_divergence, *_ = grads
        of_teacher = None if by_divergence is None else DivergenceGradients(by_divergence.contiguous(), ctx.of_teacher)
        rows = RowGradients.of(log_z, logprobs, entropies, by_logprob, by_entropy, by_named, targets, of_teacher)
        if others is not None:
            d_hidden = _targets_contribution(weight, targets, rows.at_target, like=others)
            d_hidden.add_(others * rows.by_logprob[:, None] if rows.scaled else others)
            d_hidden.mul_((rows.factor() * ctx.plan.curve.gain)[:, None])
            return d_hidden.to(hidden.dtype), None, None, None, None
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _Tiles(hidden, weight, bias, targets, ctx.plan, kept)
            return *tiles.gradients(rows, ctx.needs_input_grad), None, None


def outputs_of(
    ctx: Any, logprobs: Tensor, entropies: Tensor | None, sums: RowSums, of_teacher: DivergenceSums | None = None
) -> tuple[Tensor | None, ...]:
    """Outputs of an autograd function from log-probs [N, C], in the order of `TokenScores`; the last two: constant."""
    divergence = None if of_teacher is None else of_teacher.value.clone()
    named = logprobs[:, 1:].clone() if logprobs.shape[1] > 1 else None
    top = sums.top()
    ctx.mark_non_differentiable(*(one for one in top if one is not None))
    return logprobs[:, 0].clone(), entropies, named, divergence, *top


def _targets_contribution(weight: Tensor, targets: Tensor, factors: Tensor, *, like: Tensor) -> Tensor:
    """Sum over each row's distinct targets [N, C] of factor [N, C] times weight row, [N, H] in the dtype of `like`."""
    count, out = targets.shape[1], torch.empty_like(like)
    again = [(targets[:, :column] == targets[:, column : column + 1]).any(1) for column in range(count)]
    factors = factors.masked_fill(torch.stack(again, 1), 0.0)
    size = TILE_BYTES.get(like.device.type, TILE_BYTES["cuda"]) // like.itemsize
    rows = max(1, size // max(1, count * weight.shape[1]))
    for part, ids, factor in zip(out.split(rows), targets.split(rows), factors.split(rows), strict=True):
        torch.sum(weight[ids.clamp(0, len(weight) - 1)].to(like.dtype).mul_(factor[..., None]), 1, out=part)
    return out


class _Tiles:
    """Iteration over tiles, with the vocabulary outermost: each slice of the weight is used for all tokens at once."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: HeadPlan,
        kept: Sequence[Any] = (),
    ):
        self.kept = list(kept)  # of each tile, the exponentials and the logits that they are relative to
        self.hidden, self.weight, self.bias, self.targets, self.plan = hidden, weight, bias, targets, plan
        self.inputs = hidden.to(plan.compute)
        size, device = plan.tokens * plan.words, hidden.device
        self.buffer = torch.empty(size, dtype=plan.compute, device=device)
        minus_inf = bias is not None or plan.support is not None
        kind = _arithmetic_for(plan, targets.shape[1], device)
        self.arithmetic = kind(plan.curve, minus_inf=minus_inf, size=size, wide=plan.wide, device=device)

    def __iter__(self) -> Iterator[tuple[Tensor, Iterator[Tile]]]:
        """Slices of the weight [v, H] with their tiles."""
        for start in range(0, len(self.weight), self.plan.words):
            words = self.weight[start : start + self.plan.words].to(self.plan.compute)
            yield words, self._tiles(start, words)

    def _tiles(self, start: int, words: Tensor) -> Iterator[Tile]:
        gain = self.plan.curve.gain
        bias = None if self.bias is None else self.bias[start : start + len(words)].to(self.plan.compute)
        for first in range(0, len(self.inputs), self.plan.tokens):
            part = slice(first, first + self.plan.tokens)
            inputs = self.inputs[part]
            size = len(inputs) * len(words)
            x = (self.buffer.new_empty(size) if self.plan.keeps else self.buffer[:size]).view(len(inputs), len(words))
            if bias is not None:
                torch.addmm(bias, inputs, words.T, beta=gain, alpha=gain, out=x)
            elif self.plan.keeps and gain == 1.0:
                x = product(inputs, words)
            else:
                torch.addmm(x, inputs, words.T, beta=0, alpha=gain, out=x)
            support = None if self.plan.support is None else self.plan.support.tile(part, start, len(words))
            teacher = None
            if self.plan.teacher is not None:
                teacher = self.plan.teacher.tile(part, start, len(words), self.plan.wide, support)
            yield Tile(part, x, TargetColumns.of(self.targets[part], start, len(words), support), teacher)

    def _kept_tiles(self, log_z: Tensor) -> Iterator[tuple[Tensor, Iterator[Tile]]]:
        """As `__iter__`, but with probabilities p in place of x, computed from the exponentials that `sums` kept."""
        for number, start in enumerate(range(0, len(self.weight), self.plan.words)):
            words = self.weight[start : start + self.plan.words].to(self.plan.compute)
            weights, peak = self.kept[2 * number : 2 * number + 2]
            p = self.buffer[: weights.numel()].view_as(weights)
            torch.mul(weights, (peak - log_z).exp_()[:, None], out=p)
            yield words, iter((Tile(slice(0, len(p)), p, TargetColumns.of(self.targets, start, len(words))),))

    def sums(self) -> tuple[RowSums, Tensor | None, DivergenceSums | None, list[Tensor]]:
        """Sums of each row's softmax; with `gradient_in_forward` also sum_v p_v weight_v over other words, [N, H].

        With a teacher also the sums of the divergence, from tiles that span the whole vocabulary. The last item lists
        the exponentials that are kept for backward, each followed by the logits [n] that they are relative to.
        """
        plan = self.plan
        like, count = self.hidden.new_empty(0, dtype=plan.wide), self.targets.shape[1]
        sums = RowSums.empty(len(self.hidden), like, plan.entropy, count, min(plan.top, len(self.weight)))
        others = torch.zeros_like(self.hidden, dtype=plan.wide) if plan.gradient_in_forward else None
        of_teacher = None if plan.teacher is None else DivergenceSums.empty(len(self.hidden), like)
        for words, tiles in self:
            for part, x, targets, teacher in tiles:
                if of_teacher is not None and teacher is not None and plan.teacher is not None:
                    beta = plan.teacher.beta
                    of_teacher.put(part, self.arithmetic.divergence(x, teacher, targets.support, beta))
                added = self.arithmetic.add(x, targets, sums.rows(part), others=plan.gradient_in_forward)
                if plan.keeps:
                    self.kept += x, sums.peak.clone()
                if others is not None and added is not None:
                    weights, shrink = added
                    others[part].mul_(shrink[:, None])
                    _add_product(others[part], weights.to(plan.compute), words)
        return sums, None if others is None else others.div_(sums.total[:, None]), of_teacher, self.kept

    def gradients(
        self, rows: RowGradients, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias; None for those not needed."""
        wide = self.plan.wide
        factor = (rows.factor() * self.plan.curve.gain)[:, None]
        scaled = self.inputs.to(wide).mul(factor).to(self.plan.compute)
        d_hidden = torch.zeros_like(self.hidden, dtype=wide) if needed[0] else None
        new = torch.empty_like if len(self.hidden) else torch.zeros_like
        d_weight = new(self.weight) if needed[1] else None
        d_bias = torch.zeros_like(self.bias, dtype=wide) if needed[2] and self.bias is not None else None
        start = 0
        for words, tiles in self._kept_tiles(rows.log_z) if self.kept else self:
            stop = start + len(words)
            # A slice is summed over its tiles in the wide dtype: in place if the gradient has it.
            target = None if d_weight is None else d_weight[start:stop]
            sums = target if target is None or target.dtype == wide else torch.empty_like(target, dtype=wide)
            for part, x, targets, teacher in tiles:
                if self.kept:
                    grad = x.mul_(rows.by_logprob[:, None]) if rows.scaled else x
                    targets.put(grad, rows.at_target)
                elif teacher is not None and self.plan.teacher is not None:
                    beta = self.plan.teacher.beta
                    grad = self.arithmetic.gradient(x, targets, rows.rows(part), teacher, beta)
                else:
                    grad = self.arithmetic.gradient(x, targets, rows.rows(part))
                if d_hidden is not None:
                    _add_product(d_hidden[part], grad, words)
                if sums is not None:
                    _add_product(sums, grad.T, scaled[part], start=part.start == 0)
                if d_bias is not None:
                    d_bias[start:stop].add_(grad.T.to(wide) @ factor[part, 0])
            if target is not None and sums is not None and sums is not target and len(self.hidden):
                target.copy_(sums)
            start = stop
        if d_hidden is not None:
            d_hidden = d_hidden.mul_(factor).to(self.hidden.dtype)
        return d_hidden, d_weight, d_bias if self.bias is None or d_bias is None else d_bias.to(self.bias.dtype)


def _arithmetic_for(plan: HeadPlan, targets: int, device: torch.device) -> type[TorchTiles]:
    """Triton kernels on CUDA where they are available, correct and faster; torch otherwise, and with sampling masks."""
    if device.type != "cuda" or plan.wide != torch.float32 or plan.support or find_spec("triton") is None:
        return TorchTiles
    from covey.policy.lm_head.triton_tiles import Case, fastest_tiles

    beta = None if plan.teacher is None else plan.teacher.beta
    return fastest_tiles(Case(plan.usual, plan.compute, plan.curve, plan.entropy, targets, device, beta))


def _add_product(sums: Tensor, a: Tensor, b: Tensor, *, start: bool = False) -> None:
    """sums += a @ b (= with `start`), adding in the dtype of the sums."""
    if a.dtype == sums.dtype and not start:
        product(a, b.T, onto=sums)
    elif a.dtype == sums.dtype:
        torch.addmm(sums, a, b, beta=0, out=sums)
    elif start:
        sums.copy_(a @ b)
    else:
        sums.add_(a @ b)
