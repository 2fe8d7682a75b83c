"""How much arithmetic a step needs at the least, and how close a measured step comes to it.

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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSize:
    """What of a decoder model multiplies.

    Attributes:
        body: weights of the matrices in the layers.
        head: weights of the output head (vocabulary x hidden size), whether tied or not.
        layers: decoder layers.
        width: heads x head size, of the queries.
    """

    body: int
    head: int
    layers: int
    width: int

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> "ModelSize":
        """Read from a Llama-like `config.json`."""
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_size = config.get("head_dim") or hidden // heads
        attention = hidden * head_size * (2 * heads + 2 * kv_heads)
        return cls(layers * (attention + 3 * hidden * inner), hidden * config["vocab_size"], layers, heads * head_size)


def positions(prompt: int, lengths: Sequence[int]) -> int:
    """Token positions that a group needs computed once: the prompt, and each completion but its last token."""
    return prompt + sum(length - 1 for length in lengths)


def forward_flops(size: ModelSize, prompt: int, lengths: Sequence[int]) -> int:
    """Least operations of one forward pass over a group: a prompt and its completions."""
    pairs = prompt * (prompt + 1) // 2
    for length in lengths:
        fed = length - 1
        pairs += fed * prompt + fed * (fed + 1) // 2
    heads = 1 + sum(length - 1 for length in lengths)
    return 2 * size.body * positions(prompt, lengths) + 2 * size.head * heads + 4 * size.layers * size.width * pairs


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


def needed_positions(prompt: int, groups: Sequence[Sequence[int]], signals: Sequence[bool]) -> dict[str, int]:
    """Positions that a step needs computed, by phase (in training, forward; a backward pass goes with each)."""
    each = [positions(prompt, lengths) for lengths in groups]
    return {"generate": sum(each), "train": sum(n for n, signal in zip(each, signals, strict=True) if signal)}
