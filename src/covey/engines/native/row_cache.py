"""A key/value cache whose rows are independent completions of different lengths.

Row r holds its tokens at positions 0, 1, 2, ... from the left; each step writes one token per row at that row's own
position, and a mask hides what lies beyond it. Rows are added when a prompt is admitted and moved when another
finishes, so the rows in use are always the first ones and the tensors given to attention are views. Any model can read
it with its own attention; the engine takes it for those that cannot read a `ForkedCache`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from covey.engines.native.cache_common import additive_masks, keys_and_values

GRANULE = 64
"""Capacity grows by multiples of this many tokens."""


class RowCache(Cache):
    """Keys and values of the rows being decoded, `[rows, heads, capacity, head_dim]` per layer.

    Args:
        dtype: what keys and values are stored as: the type attention multiplies in, so that nothing is converted
            again at every step.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__(layers=[])
        self._dtype = dtype
        self.capacity = 0
        self.row_capacity = 0
        self.rows = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._width = 0
        self._prefilled: Cache | None = None
        self._lengths: list[int] = []

    def add_groups(self, prefilled: Cache | None, lengths: list[int]) -> list[int]:
        """Take in right-padded prompts (None when all are empty) of these lengths; returns a handle for each.

        The handles hold until the next call: rows start as copies, and nothing else keeps a prompt.
        """
        self._prefilled, self._lengths = prefilled, lengths
        return list(range(len(lengths)))

    def add_rows(
        self, groups: list[int], own: list[tuple[Tensor, Tensor]] | None = None, lengths: list[int] | None = None
    ) -> None:
        """Start rows as copies of the prompts of `groups`.

        Args:
            groups: the handle of each row's group.
            own: what the rows hold after their prompts, left-aligned: keys and values `[rows, heads, T, head_dim]`
                per layer. None: nothing yet.
            lengths: tokens of `own` that count, per row.
        """
        lengths = lengths or [0] * len(groups)
        prompts = [] if self._prefilled is None else keys_and_values(self._prefilled)
        width = prompts[0][0].shape[2] if prompts else 0
        longest = max(self._lengths[group] + length for group, length in zip(groups, lengths, strict=True))
        self._reserve(max(width, longest) + 1, self.rows + len(groups))
        added = slice(self.rows, self.rows + len(groups))
        for index, prompt in enumerate(prompts):
            for store, x in zip((self._keys, self._values), prompt, strict=True):
                self._storage(store, index, x)[added, :, :width] = x[groups].to(self._dtype)
        for index, pair in enumerate(own or []):
            for store, x in zip((self._keys, self._values), pair, strict=True):
                stored = self._storage(store, index, x)
                for i, (group, length) in enumerate(zip(groups, lengths, strict=True)):
                    start = self._lengths[group]
                    stored[self.rows + i, :, start : start + length] = x[i, :, :length]
        self.rows += len(groups)

    def move(self, moves: list[tuple[int, int]], rows: int) -> None:
        """Copy rows (source, target) and keep the first `rows`."""
        for stored in (*self._keys.values(), *self._values.values()):
            for source, target in moves:
                stored[target] = stored[source]
        self.rows = rows

    def begin_step(self, positions: Tensor, config: Any) -> Tensor | dict[str, Tensor]:
        """Say where each row's next token goes; returns the additive attention mask(s) the model's layers need.

        Args:
            positions: [rows] int64.
            config: the model's text config: it names the sliding window and the kinds of layer.

        Returns:
            [rows, 1, 1, width], or a dict of such by layer type for models that mix them.
        """
        self._positions = positions
        self._width = int(positions.max()) + 1
        self._reserve(self._width, self.rows)
        column = torch.arange(self._width, device=positions.device).expand(len(positions), -1)
        return additive_masks(column, torch.ones_like(column, dtype=torch.bool), positions, config, self._dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per row (`[rows, heads, 1, head_dim]`) and return everything stored so far."""
        assert self._positions is not None, "begin_step comes first"
        keys = self._storage(self._keys, layer_idx, key_states)
        values = self._storage(self._values, layer_idx, value_states)
        row = torch.arange(self.rows, device=key_states.device)
        keys[row, :, self._positions] = key_states[:, :, 0].to(self._dtype)
        values[row, :, self._positions] = value_states[:, :, 0].to(self._dtype)
        return keys[: self.rows, :, : self._width], values[: self.rows, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row before this step."""
        return max(self._width - 1, 0)

    def _reserve(self, tokens: int, rows: int) -> None:
        """Make room for `rows` rows of `tokens`, keeping what is stored. Doubling keeps the copying rare."""
        if tokens <= self.capacity and rows <= self.row_capacity:
            return
        if tokens > self.capacity:
            self.capacity = -(-max(tokens, 2 * self.capacity) // GRANULE) * GRANULE
        self.row_capacity = max(rows, self.row_capacity)
        for store in (self._keys, self._values):
            for index, old in store.items():
                grown = old.new_zeros(self.row_capacity, old.shape[1], self.capacity, old.shape[3])
                grown[: self.rows, :, : old.shape[2]] = old[: self.rows]
                store[index] = grown

    def _storage(self, store: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        """A layer's tensor, made on first use. Zeros, because masked garbage could be NaN."""
        if layer not in store:
            shape = (self.row_capacity, like.shape[1], self.capacity, like.shape[3])
            store[layer] = torch.zeros(shape, dtype=self._dtype, device=like.device)
        return store[layer]
