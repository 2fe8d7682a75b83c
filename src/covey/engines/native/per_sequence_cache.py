"""Key/value cache with a copy of the prompt for every sequence, for models that cannot read a `SharedPrefixCache`.

Sequence s holds its tokens at positions 0, 1, 2, ... from the left; each step writes one token per sequence at that
sequence's own position, and a mask hides everything beyond it. The sequences in use are always the first ones, so the
tensors given to attention are views, which any model reads with its own attention.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from covey.engines.native.prefill import KeysAndValues, additive_masks, keys_and_values
from covey.engines.native.shared_prefix_cache import SharedPrefixCache

BLOCK = 512  # on a CPU the number of columns is a multiple of this, which flash attention reads at once


class PerSequenceCache(SharedPrefixCache):
    """Keys and values of the sequences being decoded, `[sequences, heads, capacity, head_dim]` per layer.

    Handles of groups are valid until further groups are added.
    """

    shares_prompts = False

    def add_groups(self, prefilled: Cache | None, lengths: list[int]) -> list[int]:
        self._prefilled, self._lengths = prefilled, lengths
        return list(range(len(lengths)))

    def add_sequences(
        self, groups: list[int], own: KeysAndValues | None = None, lengths: list[int] | None = None
    ) -> None:
        lengths, size = lengths or [0] * len(groups), len(self._owners)
        prompts = [] if self._prefilled is None else keys_and_values(self._prefilled)
        width = prompts[0][0].shape[2] if prompts else 0
        longest = max(self._lengths[group] + length for group, length in zip(groups, lengths, strict=True))
        self._reserve(max(width, longest) + 1, size + len(groups))
        self._owners += groups
        self._counts += [max(width, longest)] * len(groups)
        for layer, prompt in enumerate(prompts):
            for stored, x in zip(self._storage(layer, prompt), prompt, strict=True):
                stored[size : size + len(groups), :, :width] = x[groups].to(self._dtype)
        for layer, pair in enumerate(own or []):
            for stored, x in zip(self._storage(layer, pair), pair, strict=True):
                for i, (group, length) in enumerate(zip(groups, lengths, strict=True)):
                    start = self._lengths[group]
                    stored[size + i, :, start : start + length] = x[i, :, :length]

    def begin_step(self, positions: Tensor, config: Any) -> Tensor | dict[str, Tensor]:
        """Set the position of each sequence's next token; returns the additive mask(s) [S, 1, 1, width]."""
        longest = int(positions.max()) + 1
        width = longest
        if positions.device.type == "cpu":
            most = getattr(config, "max_position_embeddings", None) or longest
            width = max(longest, min(most, -(-longest // BLOCK) * BLOCK))
        self._reserve(width, len(self._owners))
        self._positions, self._width, self._counts = positions, width, [longest] * len(self._owners)
        column = torch.arange(width, device=positions.device).expand(len(positions), -1)
        return additive_masks(column, torch.ones_like(column, dtype=torch.bool), positions, config, self._dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per sequence (`[S, heads, 1, head_dim]`); returns everything stored so far."""
        stored, size = self._storage(layer_idx, (key_states, value_states)), len(self._owners)
        index = torch.arange(size, device=key_states.device)
        for tensor, new in zip(stored, (key_states, value_states), strict=True):
            tensor[index, :, self._positions] = new[:, :, 0].to(self._dtype)
        return stored[0][:size, :, : self._width], stored[1][:size, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max([0, *self._counts]) - 1
