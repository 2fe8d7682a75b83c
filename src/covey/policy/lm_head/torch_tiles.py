"""Arithmetic of a linear head's logits, one tile of tokens by vocabulary at a time, in plain torch.

A tile is overwritten in place. A faster implementation of `TorchTiles` for some device has the same two methods.
Letters: n tokens and v vocabulary entries (words) in a tile, N tokens in all; C targets of each: the token itself, then
the further tokens to score.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.distillation import LEAST_LOGPROB, divergence_slopes, whole_divergence
from covey.policy.lm_head.support import TileSupport
from covey.policy.lm_head.teacher import DivergenceSums

IMPOSSIBLE = -1e4  # replaces a log-prob of -inf in p log p: its exp is 0 in every dtype, and 0 * -inf would be NaN


@dataclass(frozen=True)
class Curve:
    """Map to the softmax's logits z: gain * raw, or cap * tanh(gain * raw); tiles contain x = gain * raw."""

    gain: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, scale: float, soft_cap: float | None, temperature: float) -> "Curve":
        """Curve of the model's logit scale and soft-capping, then the temperature."""
        return cls(scale / soft_cap, soft_cap / temperature) if soft_cap else cls(scale / temperature)


class RowSums(NamedTuple):
    """Sums of each row's softmax, [n], relative to the largest logit so far (online softmax, arXiv 1805.02867)."""

    peak: Tensor  # the largest logit
    total: Tensor  # sum of exp(z - peak)
    moment: Tensor | None  # sum of exp(z - peak) * (z - peak); None if no entropy is wanted
    chosen: Tensor  # [n, C] the logits of the targets; -inf until the tile of the target was added
    # [n, k] the largest logits so far in descending order, and their tokens; -inf and an arbitrary token where there
    # are fewer. None unless wanted
    top_logits: Tensor | None
    top_ids: Tensor | None

    @classmethod
    def empty(cls, tokens: int, like: Tensor, entropy: bool, targets: int = 1, top: int = 0) -> "RowSums":
        """Sums over an empty vocabulary; a finite peak prevents NaN in rows that start with -inf."""
        peak, total, moment = torch.zeros(3, tokens, dtype=like.dtype, device=like.device)
        chosen, largest = (peak.new_full((tokens, width), -torch.inf) for width in (targets, top))
        most = (largest, torch.zeros_like(largest, dtype=torch.long)) if top else (None, None)
        return cls(peak.fill_(torch.finfo(like.dtype).min), total, moment if entropy else None, chosen, *most)

    def rows(self, part: slice) -> "RowSums":
        """View of some rows, for updates in place."""
        return RowSums(*(None if values is None else values[part] for values in self))  # type: ignore[arg-type]

    def add_top(self, logits: Tensor, ids: Tensor) -> None:
        """Update the largest logits so far with logits [n, j] of tokens `ids` [n, j]."""
        assert self.top_logits is not None and self.top_ids is not None, "they are wanted"
        every = torch.cat([self.top_logits, logits.to(self.top_logits.dtype)], dim=1)
        largest, place = every.topk(self.top_logits.shape[1], dim=1)
        self.top_ids.copy_(torch.cat([self.top_ids, ids], dim=1).gather(1, place))
        self.top_logits.copy_(largest)

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """log Z [n], log p of the targets [n, C], entropies [n] or None.

        log p is not computed from log Z, so that it keeps its digits for p near 1.
        """
        log_total = self.total.log()
        entropies = None if self.moment is None else log_total - self.moment / self.total
        return self.peak + log_total, (self.chosen - self.peak[:, None]) - log_total[:, None], entropies

    def top(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The likeliest tokens [n, k], -1 where there are fewer, and their log p, -inf there; None unless wanted."""
        if self.top_logits is None or self.top_ids is None:
            return None, None
        log_p = (self.top_logits - self.peak[:, None]) - self.total.log()[:, None]
        return self.top_ids.masked_fill(log_p == -torch.inf, -1), log_p


class DivergenceGradients(NamedTuple):
    """Values of each row for the gradient of a divergence from a teacher, all [n]."""

    by_value: Tensor  # gradient of the loss by the divergence
    sums: DivergenceSums

    def rows(self, part: slice) -> "DivergenceGradients":
        return DivergenceGradients(self.by_value[part], DivergenceSums(*(one[part] for one in self.sums)))


class RowGradients(NamedTuple):
    """Values of each row for the logits' gradient, all [n] but the last, float32 or wider."""

    log_z: Tensor  # log sum exp of the logits
    by_logprob: Tensor  # gradient of the loss by the log-probs of the targets, summed over them
    by_entropy: Tensor | None  # gradient by the entropy; None without one
    entropy: Tensor | None  # the entropy itself; None if `by_entropy` is
    # [n, C] the entries of `TorchTiles.gradient` at the targets, where the general formula would round 1 - p_y to 0;
    # equal targets have equal entries
    at_target: Tensor
    divergence: DivergenceGradients | None = None  # in addition to these; None without one

    @classmethod
    def of(
        cls,
        log_z: Tensor,
        logprobs: Tensor,
        entropy: Tensor | None,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
        by_named: Tensor | None = None,
        targets: Tensor | None = None,
        divergence: DivergenceGradients | None = None,
    ) -> "RowGradients":
        """From the results of a forward pass, and the gradients of the loss by them (None where there is none).

        Args:
            log_z, entropy: [n].
            logprobs: [n, C].
            by_logprob, by_entropy: [n], gradients by the first target's log-prob and by the entropy.
            by_named: [n, C - 1], gradients by the other targets' log-probs, discarded (even NaN) where these are -inf.
            targets: [n, C]; needed with more than one target.
            divergence: values for the gradient by a divergence from a teacher, or None.
        """
        # Gradients are often one number expanded; kernels that index memory need contiguous entries.
        by_logprob = torch.zeros_like(log_z) if by_logprob is None else by_logprob.contiguous()
        by_entropy = None if entropy is None or by_entropy is None else by_entropy.contiguous()
        if logprobs.shape[1] == 1 and by_entropy is None and divergence is None:
            return cls(log_z, by_logprob, None, None, torch.expm1(logprobs))
        log_p = logprobs.clamp_min(IMPOSSIBLE)
        if logprobs.shape[1] == 1:
            at_target = by_logprob[:, None] * torch.expm1(log_p)
        else:
            assert targets is not None
            by_named = torch.zeros_like(logprobs[:, 1:]) if by_named is None else by_named
            each = torch.where(logprobs > -torch.inf, torch.cat([by_logprob[:, None], by_named], 1), 0.0)
            own, others = torch.zeros_like(each), torch.zeros_like(each)  # sums over targets equal to each, and others
            for one, by_one in zip(targets.T[:, :, None], each.T[:, :, None], strict=True):
                equal = targets == one
                own += torch.where(equal, by_one, 0.0)
                others += torch.where(equal, 0.0, by_one)
            by_logprob = each.sum(1)
            at_target = own * torch.expm1(log_p) + others * log_p.exp()
        if by_entropy is not None and entropy is not None:
            at_target = at_target + by_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
        return cls(log_z, by_logprob, by_entropy, entropy, at_target, divergence)

    def rows(self, part: slice) -> "RowGradients":
        own: dict[str, Any] = self._asdict()
        divergence = own.pop("divergence")
        rows: dict[str, Any] = {name: None if values is None else values[part] for name, values in own.items()}
        return RowGradients(**rows, divergence=None if divergence is None else divergence.rows(part))

    @property
    def scaled(self) -> bool:
        """True if `TorchTiles.gradient` contains the gradients by log-probs and entropy; else `factor` has them."""
        return self.by_entropy is not None or self.at_target.shape[1] > 1 or self.divergence is not None

    def factor(self) -> Tensor:
        """Factor [n] that completes the rows of `TorchTiles.gradient`."""
        return torch.full_like(self.by_logprob, -1.0) if self.scaled else -self.by_logprob


class TargetColumns(NamedTuple):
    """Targets of a tile's rows: `offset` [n, C] from its first column, and `column` [n, C], clamped into the tile."""

    offset: Tensor
    column: Tensor
    start: int  # the tile's first vocabulary entry
    support: TileSupport | None = None  # tokens that could be sampled; None: the whole vocabulary

    @classmethod
    def of(cls, targets: Tensor, start: int, width: int, support: TileSupport | None = None) -> "TargetColumns":
        """Columns of targets [n, C] in a tile of the vocabulary entries start .. start + width."""
        offset = targets - start
        return cls(offset, offset.clamp(0, width - 1), start, support)

    def put(self, tile: Tensor, values: Tensor) -> None:
        """Set the targets' entries in a tile to values [n, C], if they lie in it; equal targets need equal values."""
        inside, column = self.offset == self.column, self.column
        if inside.shape[1] > 1:  # targets that are elsewhere do what the row's first one does that is in the tile
            first = inside.byte().argmax(1, keepdim=True)
            source = torch.where(inside, torch.arange(inside.shape[1], device=tile.device), first)
            column, values = column.gather(1, source), values.gather(1, source)
            inside = inside.any(1, keepdim=True)
        tile.scatter_(1, column, torch.where(inside, values, tile.gather(1, column)).to(tile.dtype))


@dataclass(eq=False)
class TorchTiles:
    """Arithmetic on one tile of logits, in torch operations."""

    curve: Curve
    _: KW_ONLY
    minus_inf: bool  # logits may be -inf
    size: int  # of the largest tile
    wide: torch.dtype  # of all sums
    device: torch.device
    _scratch: dict[str, Tensor] = field(default_factory=dict, init=False)

    def add(
        self, x: Tensor, targets: TargetColumns, sums: RowSums, *, others: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Add a tile x = gain * raw [n, v], which is overwritten, to the sums of its rows.

        With `others` it also returns exp(z - peak) [n, v], 0 at targets, which weighs a mean over the other words and
        is valid until the next call; and the factor [n] by which such sums over earlier tiles must be multiplied,
        because the peak has changed.
        """
        z = self._logits(x)
        if targets.support is not None:
            targets.support.apply_(z)
        torch.where(targets.offset == targets.column, z.gather(1, targets.column), sums.chosen, out=sums.chosen)
        if sums.top_logits is not None:
            largest, column = z.topk(min(sums.top_logits.shape[1], z.shape[1]), dim=1)
            sums.add_top(largest, column + targets.start)
        peak = torch.maximum(sums.peak, z.amax(1))
        fall = sums.peak - peak
        shrink = fall.exp()
        z.sub_(peak[:, None])
        if sums.moment is None:
            weights = z.exp_()
        else:
            if self.minus_inf:
                z.clamp_min_(IMPOSSIBLE)
            weights = torch.exp(z, out=self._scratch_like("weights", z))
            # For the earlier words: sum e^(z - new) (z - new) = shrink * (moment + (old - new) * total).
            sums.moment.addcmul_(fall, sums.total).mul_(shrink).add_(z.mul_(weights).sum(1))
        sums.total.mul_(shrink).add_(weights.sum(1))
        sums.peak.copy_(peak)
        if not others:
            return None
        targets.put(weights, torch.zeros_like(targets.column, dtype=weights.dtype))
        return weights, shrink

    def divergence(self, x: Tensor, teacher: Tensor, support: TileSupport | None, beta: float) -> DivergenceSums:
        """Divergence of whole rows x [n, V], which are not overwritten, from the teacher's logits [n, V]."""
        z = self._scratch_like("policy", x).copy_(x)
        if self.curve.cap is not None:
            z.tanh_().mul_(self.curve.cap)
        if support is not None:
            support.apply_(z)
        log_z, log_z_teacher = z.logsumexp(1), teacher.logsumexp(1)
        log_p, log_t = _finite(z.sub_(log_z[:, None])), _finite(teacher - log_z_teacher[:, None])
        return DivergenceSums(*whole_divergence(log_p, log_t, beta), log_z_teacher)

    def gradient(
        self,
        x: Tensor,
        targets: TargetColumns,
        rows: RowGradients,
        teacher: Tensor | None = None,
        beta: float = 1.0,
    ) -> Tensor:
        """Gradient of the loss by x without the factor `rows.factor()`, [n, v] in the dtype of x; overwrites x.

        With p = softmax(z): d log p_y / dz = 1[y] - p and dH / dz = -p (log p + H); a sum over targets y with gradients
        g_y has sum_y g_y 1[y] - (sum_y g_y) p. `teacher` are its logits [n, v], with `rows.divergence`.
        """
        z = self._logits(x)
        slope = None
        if self.curve.cap is not None:  # dz / dx = cap (1 - tanh^2), and z / cap is the tanh
            slope = torch.div(z, self.curve.cap, out=self._scratch_like("slope", z)).square_().neg_().add_(1.0)
            slope.mul_(self.curve.cap)
        by_penalty = None if targets.support is None else targets.support.apply_(z)
        log_p = z.sub_(rows.log_z[:, None])
        of_teacher = None
        if rows.divergence is not None and teacher is not None:
            by_value, sums = rows.divergence
            log_t = _finite(teacher - sums.log_z[:, None])
            of_teacher = divergence_slopes(_finite(log_p.clone()), log_t, beta, sums.centre).mul_(by_value[:, None])
        if rows.by_entropy is None or rows.entropy is None:
            grad = log_p.exp_()
            if rows.scaled:
                grad.mul_(rows.by_logprob[:, None])
        else:
            p = torch.exp(log_p, out=self._scratch_like("weights", z))
            if self.minus_inf:
                log_p.clamp_min_(IMPOSSIBLE)
            grad = log_p.add_(rows.entropy[:, None]).mul_(rows.by_entropy[:, None])
            grad.add_(rows.by_logprob[:, None]).mul_(p)
        targets.put(grad, rows.at_target)
        if of_teacher is not None:
            grad.sub_(of_teacher)
        for factor in (slope, by_penalty):
            if factor is not None:
                grad.mul_(factor)
        return grad if x.dtype == grad.dtype else x.copy_(grad)

    def _logits(self, x: Tensor) -> Tensor:
        """Logits z [n, v] in the wide dtype, in place where x has it."""
        z = x if x.dtype == self.wide else self._scratch_like("wide", x).copy_(x)
        return z if self.curve.cap is None else z.tanh_().mul_(self.curve.cap)

    def _scratch_like(self, name: str, like: Tensor) -> Tensor:
        """Scratch memory of a tile's shape, reused by every tile."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self.size, dtype=self.wide, device=self.device)
        return self._scratch[name][: like.numel()].view(like.shape)


def _finite(log_p: Tensor) -> Tensor:
    """Replace a log-prob of -inf by `IMPOSSIBLE`, in place."""
    return log_p.masked_fill_(log_p == -torch.inf, LEAST_LOGPROB).clamp_min_(IMPOSSIBLE)
