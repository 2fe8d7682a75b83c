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

GRANULE = 64  # capacities in tokens are multiples of this


class PerSequenceCache(Cache):
    """Keys and values of the sequences being decoded, `[sequences, heads, capacity, head_dim]` per layer."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(layers=[])
        self._dtype = dtype
        self.capacity = 0
        self.sequence_capacity = 0
        self.size = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._width = 0
        self._prefilled: Cache | None = None
        self._lengths: list[int] = []

    def add_groups(self, prefilled: Cache | None, lengths: list[int]) -> list[int]:
        """Take right-padded prompts (None: all are empty) of these lengths; handles are valid until the next call."""
        self._prefilled, self._lengths = prefilled, lengths
        return list(range(len(lengths)))

    def add_sequences(
        self, groups: list[int], own: KeysAndValues | None = None, lengths: list[int] | None = None
    ) -> None:
        """Start sequences as copies of the prompts of `groups`; see `SharedPrefixCache.add_sequences`."""
        lengths = lengths or [0] * len(groups)
        prompts = [] if self._prefilled is None else keys_and_values(self._prefilled)
        width = prompts[0][0].shape[2] if prompts else 0
        longest = max(self._lengths[group] + length for group, length in zip(groups, lengths, strict=True))
        self._reserve(max(width, longest) + 1, self.size + len(groups))
        added = slice(self.size, self.size + len(groups))
        for layer, prompt in enumerate(prompts):
            for store, x in zip((self._keys, self._values), prompt, strict=True):
                self._storage(store, layer, x)[added, :, :width] = x[groups].to(self._dtype)
        for layer, pair in enumerate(own or []):
            for store, x in zip((self._keys, self._values), pair, strict=True):
                stored = self._storage(store, layer, x)
                for i, (group, length) in enumerate(zip(groups, lengths, strict=True)):
                    start = self._lengths[group]
                    stored[self.size + i, :, start : start + length] = x[i, :, :length]
        self.size += len(groups)

    def move(self, moves: list[tuple[int, int]], size: int) -> None:
        """Copy sequences (source, target), then drop all but the first `size`."""
        for stored in (*self._keys.values(), *self._values.values()):
            for source, target in moves:
                stored[target] = stored[source]
        self.size = size

    def begin_step(self, positions: Tensor, config: Any) -> Tensor | dict[str, Tensor]:
        """Set the position of each sequence's next token; returns the additive mask(s) [S, 1, 1, width]."""
        self._positions = positions
        self._width = int(positions.max()) + 1
        self._reserve(self._width, self.size)
        column = torch.arange(self._width, device=positions.device).expand(len(positions), -1)
        return additive_masks(column, torch.ones_like(column, dtype=torch.bool), positions, config, self._dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per sequence (`[S, heads, 1, head_dim]`); returns everything stored so far."""
        assert self._positions is not None, "begin_step comes first"
        keys = self._storage(self._keys, layer_idx, key_states)
        values = self._storage(self._values, layer_idx, value_states)
        index = torch.arange(self.size, device=key_states.device)
        keys[index, :, self._positions] = key_states[:, :, 0].to(self._dtype)
        values[index, :, self._positions] = value_states[:, :, 0].to(self._dtype)
        return keys[: self.size, :, : self._width], values[: self.size, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._width - 1, 0)

    def _reserve(self, tokens: int, size: int) -> None:
        """Reserve capacity for `size` sequences of `tokens`; doubling bounds the cost of copying."""
        if tokens <= self.capacity and size <= self.sequence_capacity:
            return
        if tokens > self.capacity:
            self.capacity = -(-max(tokens, 2 * self.capacity) // GRANULE) * GRANULE
        self.sequence_capacity = max(size, self.sequence_capacity)
        for store in (self._keys, self._values):
            for layer, old in store.items():
                grown = old.new_zeros(self.sequence_capacity, old.shape[1], self.capacity, old.shape[3])
                grown[: self.size, :, : old.shape[2]] = old[: self.size]
                store[layer] = grown

    def _storage(self, store: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        """Tensor of a layer, allocated on first use with zeros, because masked garbage could be NaN."""
        if layer not in store:
            shape = (self.sequence_capacity, like.shape[1], self.capacity, like.shape[3])
            store[layer] = torch.zeros(shape, dtype=self._dtype, device=like.device)
        return store[layer]
