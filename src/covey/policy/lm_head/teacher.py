"""Logits of teachers next to the policy's, for a divergence over the whole vocabulary.

A teacher's hidden states are kept from the pass in which it scored the tokens; its logits are computed from them one
tile at a time. Letters as in linear.py; W is the width of the widest teacher's hidden states.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from covey.policy.lm_head.support import TileSupport


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A constant plain linear head: hidden states [n, H] -> logits [n, V]."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # multiplies the logits
    soft_cap: float | None = None  # then z -> cap * tanh(z / cap), if any

    def logits(
        self, hidden: Tensor, words: slice, temperature: float, compute: torch.dtype, wide: torch.dtype
    ) -> Tensor:
        """Logits of some words of the vocabulary at a temperature, [n, words] in the wide dtype."""
        bias = None if self.bias is None else self.bias[words].to(compute)
        z = linear(hidden.to(compute), self.weight[words].to(compute), bias).to(wide)
        if self.soft_cap:
            return z.mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap / temperature)
        return z.mul_(self.scale / temperature)


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """The teachers of N positions, and which divergence from them to compute."""

    heads: tuple[TeacherHead, ...]
    hidden: Tensor  # [N, W]
    numbers: Tensor | None  # [N] index of each position's head, -1 without a teacher; None: all have head 0
    beta: float  # β of `covey.core.distillation.whole_divergence`
    temperature: float
    compute: torch.dtype | None = None  # of products; None: the dtype of each head's weight

    def tile(self, part: slice, start: int, width: int, wide: torch.dtype, support: TileSupport | None) -> Tensor:
        """Logits [n, width] of the words start .. start + width, over the same tokens as the policy's.

        Words that a teacher lacks are -inf; a position without a teacher has zeros.
        """
        hidden, words = self.hidden[part], slice(start, start + width)
        if len(self.heads) == 1:
            z = self._logits(self.heads[0], hidden, words, wide)
        else:
            assert self.numbers is not None, "several teachers"
            z, numbers = hidden.new_zeros(len(hidden), width, dtype=wide), self.numbers[part]
            for number, head in enumerate(self.heads):
                rows = (numbers == number).nonzero()[:, 0]
                if len(rows):
                    z[rows] = self._logits(head, hidden[rows], words, wide)
        if support is not None:
            support.apply_(z)
        return z

    def _logits(self, head: TeacherHead, hidden: Tensor, words: slice, wide: torch.dtype) -> Tensor:
        states = hidden[:, : head.weight.shape[1]]
        z = head.logits(states, words, self.temperature, self.compute or head.weight.dtype, wide)
        lacking = words.stop - words.start - z.shape[1]
        return pad(z, (0, lacking), value=-torch.inf) if lacking else z


class DivergenceSums(NamedTuple):
    """Results of whole rows, all [n]."""

    value: Tensor  # the divergence
    centre: Tensor  # centre of its gradient; see `whole_divergence`
    log_z: Tensor  # log sum exp of the teacher's logits

    @classmethod
    def empty(cls, tokens: int, like: Tensor) -> "DivergenceSums":
        return cls(*torch.zeros(3, tokens, dtype=like.dtype, device=like.device))

    def put(self, part: slice, values: "DivergenceSums") -> None:
        for whole, one in zip(self, values, strict=True):
            whole[part] = one
