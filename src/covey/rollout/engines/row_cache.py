"""A key/value cache whose rows are independent completions of different lengths.

Row r holds its tokens at positions 0, 1, 2, ... from the left; each step writes one token per row at that row's own
position, and a mask hides what lies beyond it. Rows are appended when a prompt is admitted and moved when another
finishes, so the rows in use are always the first ones and the tensors given to attention are views.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

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

    def append(self, prefilled: Cache | None, owners: Tensor, width: int) -> None:
        """Add `len(owners)` rows; row i starts as a copy of prefilled prompt `owners[i]`.

        Args:
            prefilled: a cache of right-padded prompts, or None when the prompts have nothing to prefill.
            owners: [R] int64.
            width: tokens of the longest prefilled prompt.
        """
        self._reserve(width + 1, self.rows + len(owners))
        added = slice(self.rows, self.rows + len(owners))
        layers: list[Any] = [] if prefilled is None else list(prefilled.layers)
        for index, layer in enumerate(layers):
            width = layer.keys.shape[2]
            self._storage(self._keys, index, layer.keys)[added, :, :width] = layer.keys[owners].to(self._dtype)
            self._storage(self._values, index, layer.values)[added, :, :width] = layer.values[owners].to(self._dtype)
        self.rows += len(owners)

    def move(self, source: int, target: int) -> None:
        """Copy row `source`, the last one, over `target` and forget it."""
        assert source == self.rows - 1, "only the last row may leave its place"
        if source != target:
            for stored in (*self._keys.values(), *self._values.values()):
                stored[target] = stored[source]
        self.rows -= 1

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
        column = torch.arange(self._width, device=positions.device)
        causal = column <= positions[:, None]
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        sliding = causal & (column > positions[:, None] - window) if window else causal
        if len(kinds) > 1:
            return {k: _additive(sliding if k == "sliding_attention" else causal, self._dtype) for k in kinds}
        uses_window = "sliding_attention" in kinds if kinds else window is not None
        return _additive(sliding if uses_window else causal, self._dtype)

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


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None, None]
