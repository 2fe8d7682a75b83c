"""Weights held in half precision: the share that an update of a given size can change, and the share it did change."""

from collections.abc import Iterable

import torch
from torch import Tensor

DIGITS = {torch.bfloat16: 8, torch.float16: 11}  # binary digits of a number, with the leading one
LOOKED_AT = 4096  # most numbers of a tensor in a sample


def sample(weights: Iterable[Tensor]) -> list[Tensor]:
    """Copies of numbers spread evenly over each tensor, at most `LOOKED_AT` per tensor."""
    return [_spread(weight.detach()).clone() for weight in weights]


def _spread(weight: Tensor) -> Tensor:
    flat = weight.flatten()
    return flat[:: max(1, -(-flat.numel() // LOOKED_AT))]


def share_that_moves(weights: Iterable[Tensor], update: float) -> float:
    """Share of numbers w with |update| >= half the distance to the next number of their format; others round back.

    A number in [2^(e-1), 2^e) of a format with d digits has neighbours at a distance of 2^(e-d).
    """
    moved = total = 0
    for weight in weights:
        values = _spread(weight.detach())
        _, exponents = torch.frexp(values.float())
        steps = torch.ldexp(torch.ones_like(values, dtype=torch.float32), exponents - DIGITS[values.dtype])
        able = (steps / 2 <= update) | (values == 0)
        moved, total = moved + int(able.sum()), total + able.numel()
    return moved / total if total else 1.0


def held_in_half(policy: torch.nn.Module) -> list[Tensor]:
    """Trained weights that are held in bfloat16 or float16."""
    return [weight for weight in policy.parameters() if weight.requires_grad and weight.dtype in DIGITS]


def changed(before: list[Tensor], weights: Iterable[Tensor]) -> tuple[int, int]:
    """Numbers of the sample `before` that differ in `weights` now, and all of them; reads each device once."""
    counts: dict[torch.device, Tensor] = {}
    for earlier, weight in zip(before, weights, strict=True):
        moved = (_spread(weight.detach()) != earlier).sum()
        counts[moved.device] = counts[moved.device] + moved if moved.device in counts else moved
    return sum(int(count) for count in counts.values()), sum(earlier.numel() for earlier in before)
