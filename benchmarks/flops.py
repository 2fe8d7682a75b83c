"""Minimum arithmetic of a step, and the share of it in a measured step.

What is counted is the unique work in floating-point operations (a multiplication and an addition are two):

- sampling: every distinct prompt once, and every completion token that is fed back once (the last one never is);
- training: forward and backward (twice the forward) over the prompt, once, and over the completion tokens but the last
  of every group with a signal; groups without one need no training;
- the head at the positions that predict a completion token: the last of the prompt, shared by the group, and all of
  each completion but the last; embedding is a look-up and free;
- per position, `2 * body` for the matrices of the layers and `4 * layers * width` for each position it attends to
  (`q k^T` and the weighted sum of the values), itself included.

So with a prompt of P tokens, completion lengths L_i, and causal attention pairs A = P (P + 1) / 2 +
sum_i sum_{t < L_i - 1} (P + t + 1):

    positions = P + sum_i (L_i - 1)         heads = 1 + sum_i (L_i - 1)
    forward   = 2 * body * positions + 2 * head * heads + 4 * layers * width * A
    minimum   = sum over groups (forward + 3 * forward where there is a signal)

Efficiency is `minimum / (peak * seconds)`, with the peak measured as a large float32 matrix product on the same threads
between the steps. The optimizer, the softmax and everything elementwise are left out of the minimum, so 1 cannot be
reached.

`least_seconds` is the roofline of each phase. Prompts and training take their operations at the peak. A decode step
takes the operations of all sequences that are left at the peak, or the time in which the weights are read, whichever is
longer; how fast memory is read is measured as a sum over 256 MiB.
"""

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

from covey.sizing.step_cost import ModelSize, forward_flops, positions

__all__ = ["ModelSize", "forward_flops", "least_seconds", "minimum_flops", "needed_positions", "positions", "size_of"]


def size_of(config: dict[str, Any]) -> ModelSize:
    """Read from a Llama-like `config.json`."""
    return ModelSize.of(SimpleNamespace(**config))


def minimum_flops(
    size: ModelSize, prompt: int, groups: Sequence[Sequence[int]], signals: Sequence[bool]
) -> dict[str, int]:
    """Least operations of a step, by phase.

    Args:
        size: of the model.
        prompt: tokens of every prompt.
        groups: completion lengths of each group.
        signals: whether each group's rewards differ.

    Returns:
        `generate` and `train`.
    """
    forward = [forward_flops(size, prompt, lengths) for lengths in groups]
    return {
        "generate": sum(forward),
        "train": 3 * sum(f for f, signal in zip(forward, signals, strict=True) if signal),
    }


def least_seconds(
    size: ModelSize,
    prompt: int,
    groups: Sequence[Sequence[int]],
    signals: Sequence[bool],
    *,
    peak: float,
    bandwidth: float,
) -> dict[str, float]:
    """Seconds below which the machine cannot do a step in float32, by phase.

    Args:
        size: of the model.
        prompt: tokens of every prompt.
        groups: completion lengths of each group.
        signals: whether each group's rewards differ.
        peak: operations a second.
        bandwidth: bytes a second.

    Returns:
        `generate` and `train`.
    """
    prompts = sum(forward_flops(size, prompt, []) for _ in groups)
    lengths = list(chain.from_iterable(groups))
    decoding = 0.0
    for step in range(1, max(lengths)):
        left = sum(length > step for length in lengths)
        each = 2 * (size.body + size.head) + 4 * size.layers * size.width * (prompt + step)
        decoding += max(left * each / peak, 4 * (size.body + size.head) / bandwidth)
    trained = minimum_flops(size, prompt, groups, signals)["train"]
    return {"generate": prompts / peak + decoding, "train": trained / peak}


def needed_positions(prompt: int, groups: Sequence[Sequence[int]], signals: Sequence[bool]) -> dict[str, int]:
    """Positions that a step needs computed, by phase (in training, forward; a backward pass goes with each)."""
    each = [positions(prompt, lengths) for lengths in groups]
    return {"generate": sum(each), "train": sum(n for n, signal in zip(each, signals, strict=True) if signal)}
