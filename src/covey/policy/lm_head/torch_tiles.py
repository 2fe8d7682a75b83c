"""Arithmetic of a linear head's logits, one tile of tokens by vocabulary at a time, in plain torch.

A tile is overwritten in place. A faster implementation of `TorchTiles` for some device has the same two methods.
Letters: n tokens and v vocabulary entries in a tile, N tokens in all.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from covey.policy.lm_head.support import TileSupport

IMPOSSIBLE = -1e4  # replaces a log-prob of -inf where it is multiplied by its probability: its exp is 0 in every dtype


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
    chosen: Tensor  # the logit of the target, once its tile has been seen

    @classmethod
    def empty(cls, tokens: int, like: Tensor, entropy: bool) -> "RowSums":
        """Sums over an empty vocabulary; a finite peak prevents NaN in rows that start with -inf."""
        peak, total, moment, chosen = torch.zeros(4, tokens, dtype=like.dtype, device=like.device)
        return cls(peak.fill_(torch.finfo(like.dtype).min), total, moment if entropy else None, chosen)

    def rows(self, part: slice) -> "RowSums":
        """View of some rows, for updates in place."""
        moment = None if self.moment is None else self.moment[part]
        return RowSums(self.peak[part], self.total[part], moment, self.chosen[part])

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """log Z, log p of the targets (without log Z, so that p near 1 keeps its digits), entropies or None, [n]."""
        log_total = self.total.log()
        entropies = None if self.moment is None else log_total - self.moment / self.total
        return self.peak + log_total, (self.chosen - self.peak) - log_total, entropies


class RowGradients(NamedTuple):
    """Values of each row for the logits' gradient, all [n], float32 or wider."""

    log_z: Tensor  # log sum exp of the logits
    by_logprob: Tensor  # gradient of the loss by the log-prob of the target
    by_entropy: Tensor | None  # gradient by the entropy; None without one
    entropy: Tensor | None  # the entropy itself; None likewise
    # the entry of `TorchTiles.gradient` at the target, where the general formula would round 1 - p_y away
    at_target: Tensor

    @classmethod
    def of(
        cls,
        log_z: Tensor,
        logprob: Tensor,
        entropy: Tensor | None,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
    ) -> "RowGradients":
        """From results [n] and their gradients, None where there is none."""
        # Gradients are often one number expanded; kernels that index memory need contiguous entries.
        by_logprob = torch.zeros_like(logprob) if by_logprob is None else by_logprob.contiguous()
        if by_entropy is None or entropy is None:
            return cls(log_z, by_logprob, None, None, torch.expm1(logprob))
        by_entropy = by_entropy.contiguous()
        log_p = logprob.clamp_min(IMPOSSIBLE)
        at_target = by_logprob * torch.expm1(log_p) + by_entropy * log_p.exp() * (log_p + entropy)
        return cls(log_z, by_logprob, by_entropy, entropy, at_target)

    def rows(self, part: slice) -> "RowGradients":
        return RowGradients(*(None if values is None else values[part] for values in self))  # type: ignore[arg-type]

    def factor(self) -> Tensor:
        """Factor [n] that completes the rows of `TorchTiles.gradient`."""
        return -self.by_logprob if self.by_entropy is None else torch.full_like(self.by_logprob, -1.0)


class TargetColumns(NamedTuple):
    """Targets of a tile's rows: `offset` [n] from its first column, and `column` [n], clamped into the tile."""

    offset: Tensor
    column: Tensor
    support: TileSupport | None = None  # of the rows' distributions; None: the whole softmax

    @classmethod
    def of(cls, targets: Tensor, start: int, width: int, support: TileSupport | None = None) -> "TargetColumns":
        """Columns of targets [n] in a tile of the vocabulary entries start .. start + width."""
        offset = targets - start
        return cls(offset, offset.clamp(0, width - 1), support)

    def put(self, tile: Tensor, values: Tensor | float) -> None:
        """Set the targets' entries [n] of a tile, in rows whose target is in it."""
        each = torch.arange(len(tile), device=tile.device)
        inside = self.offset == self.column
        tile[each, self.column] = torch.where(inside, values, tile[each, self.column])


@dataclass(eq=False)
class TorchTiles:
    """Tile arithmetic."""

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

        With `others` also return the weights of a mean over all words but the target: exp(z - peak) [n, v], 0 at
        targets, valid until the next call; and the factor [n] by which sums of earlier such tiles shrink.
        """
        z = self._logits(x)
        if targets.support is not None:
            targets.support.apply_(z)
        chosen = z.gather(1, targets.column[:, None])[:, 0]
        torch.where(targets.offset == targets.column, chosen, sums.chosen, out=sums.chosen)
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
        targets.put(weights, 0.0)
        return weights, shrink

    def gradient(self, x: Tensor, targets: TargetColumns, rows: RowGradients) -> Tensor:
        """Gradient of the loss by x without the factor `rows.factor()`, [n, v] in the dtype of x; overwrites x.

        With p = softmax(z): d log p_y / dz = 1[y] - p and dH / dz = -p (log p + H).
        """
        z = self._logits(x)
        slope = None
        if self.curve.cap is not None:  # dz / dx = cap (1 - tanh^2), and z / cap is the tanh
            slope = torch.div(z, self.curve.cap, out=self._scratch_like("slope", z)).square_().neg_().add_(1.0)
            slope.mul_(self.curve.cap)
        by_penalty = None if targets.support is None else targets.support.apply_(z)
        log_p = z.sub_(rows.log_z[:, None])
        if rows.by_entropy is None:
            grad = log_p.exp_()
        else:
            assert rows.entropy is not None
            p = torch.exp(log_p, out=self._scratch_like("weights", z))
            if self.minus_inf:
                log_p.clamp_min_(IMPOSSIBLE)
            grad = log_p.add_(rows.entropy[:, None]).mul_(rows.by_entropy[:, None])
            grad.add_(rows.by_logprob[:, None]).mul_(p)
        targets.put(grad, rows.at_target)
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
