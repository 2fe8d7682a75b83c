"""Random numbers that are a function of where they are used, not of what was drawn before.

Number i of token t of the completion with seed s is a hash of (s, t, i). Nothing is stored and nothing advances, so
any number of rows and positions is drawn in one vectorised call, in any order, with the same result on every device;
and a position can be drawn again later, which is how drafts are verified.
"""

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number: splitmix64's stride
_STEP = -0x2E0A2D0F7C9D4A35  # an odd stride of its own for tokens, far from multiples of the other
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


def uniforms(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """`count` uniform numbers for each (seed, step) pair.

    Every pair starts a splitmix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014) at a hashed state.

    Args:
        seeds: [R] int64.
        steps: [R] int64, which token of the completion.
        count: numbers per pair.

    Returns:
        [R, count] float64, strictly between 0 and 1.
    """
    start = _mix(_mix(seeds) + steps * _STEP)
    slots = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    return _between_0_and_1(_shift(_mix(start[:, None] + slots), 12))


def _between_0_and_1(bits: Tensor) -> Tensor:
    """52 bits, as integers, to the middles of 2**52 equal intervals; of one bit more, the last would round to 1."""
    return bits.double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every input bit moves every output bit."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
