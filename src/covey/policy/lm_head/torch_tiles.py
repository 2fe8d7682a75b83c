"""The arithmetic of a linear head's logits, one tile of tokens by vocabulary at a time, in plain torch.

A tile is overwritten where it lies, so that little memory is touched. Here are the running sums over the vocabulary
(forward) and the logits' gradient once these are known (backward); the walk over the tiles is in lm_head_linear.py. A
faster implementation of `TorchTiles` for some device offers the same two methods.

Letters: n tokens and v vocabulary entries in a tile, N tokens in all.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IMPOSSIBLE = -1e4
"""Stands for a log-prob of -inf where it is multiplied by its probability: exp of it is 0 in every type."""


@dataclass(frozen=True)
class Curve:
    """From what the head multiplies out to the logits z that the softmax sees.

    z = gain * raw, or z = cap * tanh(gain * raw) with soft-capping. `gain` is applied inside the matrix product, so a
    tile comes in as x = gain * raw.
    """

    gain: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, scale: float, soft_cap: float | None, temperature: float) -> "Curve":
        """The model's logit scale and soft-capping, then the temperature."""
        return cls(scale / soft_cap, soft_cap / temperature) if soft_cap else cls(scale / temperature)


class RowSums(NamedTuple):
    """What is known of each row's softmax after some of the vocabulary, all [n], float32 or wider.

    Online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867): sums are relative to the largest logit so far, and
    shrink by exp(old peak - new peak) when a larger one comes.

    Attributes:
        peak: the largest logit.
        total: sum of exp(z - peak).
        moment: sum of exp(z - peak) * (z - peak); None if no entropy is wanted.
        chosen: the logit of the target, once its tile has been seen.
    """

    peak: Tensor
    total: Tensor
    moment: Tensor | None
    chosen: Tensor

    @classmethod
    def before_any(cls, tokens: int, like: Tensor, entropy: bool) -> "RowSums":
        """Sums over nothing; a finite peak keeps rows that start with -inf free of NaN."""
        zeros = [torch.zeros(tokens, dtype=like.dtype, device=like.device) for _ in range(4)]
        return cls(zeros[0] + torch.finfo(like.dtype).min, zeros[1], zeros[2] if entropy else None, zeros[3])

    def rows(self, start: int, stop: int) -> "RowSums":
        """A view of some rows: what is added to it is added here."""
        moment = None if self.moment is None else self.moment[start:stop]
        return RowSums(self.peak[start:stop], self.total[start:stop], moment, self.chosen[start:stop])

    def log_z(self) -> Tensor:
        """log sum exp of the logits, [n]."""
        return self.peak + self.total.log()

    def logprobs(self) -> Tensor:
        """log p of the targets, [n]; log Z is never formed, so a p near 1 keeps its digits."""
        return (self.chosen - self.peak) - self.total.log()

    def entropies(self) -> Tensor | None:
        """H = log Z - E[z] = log(total) - moment / total, in nats, [n]."""
        return None if self.moment is None else self.total.log() - self.moment / self.total


class RowGradients(NamedTuple):
    """What the logits' gradient needs of each row, all [n], float32 or wider.

    Attributes:
        log_z: log sum exp of the logits.
        by_logprob: gradient of the loss by the log-prob of the target.
        by_entropy: gradient by the entropy; None where nothing flows into it.
        entropy: the entropy itself; None likewise.
        at_target: the entry of `TorchTiles.gradient` at the target, where the general formula would round 1 - p_y away.
    """

    log_z: Tensor
    by_logprob: Tensor
    by_entropy: Tensor | None
    entropy: Tensor | None
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
        """From results [n] and the gradients that flow into them, None where none does."""
        # Gradients often come as one number expanded; kernels that index memory need every entry to be there.
        by_logprob = torch.zeros_like(logprob) if by_logprob is None else by_logprob.contiguous()
        if by_entropy is None or entropy is None:
            return cls(log_z, by_logprob, None, None, torch.expm1(logprob))
        by_entropy = by_entropy.contiguous()
        log_p = logprob.clamp_min(IMPOSSIBLE)
        at_target = by_logprob * torch.expm1(log_p) + by_entropy * log_p.exp() * (log_p + entropy)
        return cls(log_z, by_logprob, by_entropy, entropy, at_target)

    def rows(self, start: int, stop: int) -> "RowGradients":
        """A view of some rows."""
        return RowGradients(*(None if part is None else part[start:stop] for part in self))  # type: ignore[arg-type]

    def factor(self) -> Tensor:
        """What every entry of a row of `TorchTiles.gradient` is still to be multiplied by, [n]."""
        return -self.by_logprob if self.by_entropy is None else torch.full_like(self.by_logprob, -1.0)


class Places(NamedTuple):
    """Where the targets of a tile's rows lie: `offset` [n] from its first column, or `column` [n], clamped into it."""

    offset: Tensor
    column: Tensor

    @classmethod
    def of(cls, targets: Tensor, start: int, width: int) -> "Places":
        """Of targets [n] in a tile of the vocabulary entries start .. start + width."""
        offset = targets - start
        return cls(offset, offset.clamp(0, width - 1))

    def put(self, tile: Tensor, values: Tensor | float) -> None:
        """Set the targets' entries [n] of a tile, in those rows whose target lies within."""
        each = torch.arange(len(tile), device=tile.device)
        inside = self.offset == self.column
        tile[each, self.column] = torch.where(inside, values, tile[each, self.column])


class TorchTiles:
    """Tile arithmetic in torch operations.

    Args:
        curve: from the tile's entries to logits.
        minus_inf: the head may give logits of -inf; costs a pass where entropies are concerned.
        room: entries of the largest tile.
        wide: float32 or wider, the type of all sums.
    """

    def __init__(self, curve: Curve, *, minus_inf: bool, room: int, wide: torch.dtype, device: torch.device):
        self.curve = curve
        self.minus_inf = minus_inf
        self.room = room
        self.wide = wide
        self.device = device
        self._scratch: dict[str, Tensor] = {}

    def add(self, x: Tensor, places: Places, sums: RowSums, *, others: bool = False) -> tuple[Tensor, Tensor] | None:
        """Take a tile into the sums of its rows.

        Args:
            x: gain * raw, [n, v]; overwritten.
            sums: of these rows; updated in place.
            others: return what a mean over all words but the target needs.

        Returns:
            With `others`: exp(z - peak) [n, v], 0 at targets, valid until the next call; and the factor [n] by which
            sums of earlier such tiles shrink.
        """
        z = self._logits(x)
        chosen = z.gather(1, places.column[:, None])[:, 0]
        torch.where(places.offset == places.column, chosen, sums.chosen, out=sums.chosen)
        peak = torch.maximum(sums.peak, z.amax(1))
        fall = sums.peak - peak
        shrink = fall.exp()
        z.sub_(peak[:, None])
        if sums.moment is None:
            weights = z.exp_()
        else:
            if self.minus_inf:
                z.clamp_min_(IMPOSSIBLE)
            weights = torch.exp(z, out=self._room_for("weights", z))
            # Of the older part: sum e^(z - new) (z - new) = shrink * (moment + (old - new) * total).
            sums.moment.addcmul_(fall, sums.total).mul_(shrink).add_(z.mul_(weights).sum(1))
        sums.total.mul_(shrink).add_(weights.sum(1))
        sums.peak.copy_(peak)
        if not others:
            return None
        places.put(weights, 0.0)
        return weights, shrink

    def gradient(self, x: Tensor, places: Places, rows: RowGradients) -> Tensor:
        """The loss's gradient by x, short of `rows.factor()`, [n, v] in the type of x; overwrites x.

        With p = softmax(z): d log p_y / dz = 1[y] - p and dH / dz = -p (log p + H).
        """
        z = self._logits(x)
        slope = None
        if self.curve.cap is not None:  # dz / dx = cap (1 - tanh^2), and z / cap is the tanh
            slope = torch.div(z, self.curve.cap, out=self._room_for("slope", z)).square_().neg_().add_(1.0)
            slope.mul_(self.curve.cap)
        log_p = z.sub_(rows.log_z[:, None])
        if rows.by_entropy is None:
            grad = log_p.exp_()
        else:
            assert rows.entropy is not None
            p = torch.exp(log_p, out=self._room_for("weights", z))
            if self.minus_inf:
                log_p.clamp_min_(IMPOSSIBLE)
            grad = log_p.add_(rows.entropy[:, None]).mul_(rows.by_entropy[:, None])
            grad.add_(rows.by_logprob[:, None]).mul_(p)
        places.put(grad, rows.at_target)
        if slope is not None:
            grad.mul_(slope)
        return grad if x.dtype == grad.dtype else x.copy_(grad)

    def _logits(self, x: Tensor) -> Tensor:
        """z [n, v] in the wide type, over x itself where it has that type."""
        z = x if x.dtype == self.wide else self._room_for("wide", x).copy_(x)
        return z if self.curve.cap is None else z.tanh_().mul_(self.curve.cap)

    def _room_for(self, name: str, like: Tensor) -> Tensor:
        """Scratch memory of a tile's shape, the same for every tile."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self.room, dtype=self.wide, device=self.device)
        return self._scratch[name][: like.numel()].view(like.shape)
