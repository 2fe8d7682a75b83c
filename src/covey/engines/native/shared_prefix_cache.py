"""A key/value cache in which the completions of a group share their prompt, and the attention that reads it.

Prompts are stored once per group, right-padded; what a row has sampled is stored per row, aligned on the right: every
step writes one column for all rows, whenever they were admitted, and a mask hides the columns before a row's first.
The keys and values of a group's rows are never brought together, so each prompt is read once per step, for all its
rows at once. No model is patched: the attention function is registered with transformers and finds the cache in a
keyword argument (`forked`) of the model's forward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from covey.engines.native.cache_common import additive_masks, keys_and_values
from covey.engines.native.slots import SlotMap

FORKED_ATTENTION = "covey_forked"
"""The attention implementation a decoding step runs under."""

GRANULE = 64
"""Capacities in tokens are multiples of this."""


class ForkedCache(Cache):
    """Keys and values of groups of rows being decoded.

    Per layer the prompts are `[kv_heads, groups, prompt, head_dim]`, read once for all rows of a group, and the rest
    `[rows, kv_heads, columns, head_dim]`, so that the rows in use are one block: products read both in place.

    Args:
        dtype: what keys and values are stored as: the type attention multiplies in.
        softcap: whether the model's own attention honours soft-capping (transformers' SDPA does not).
    """

    def __init__(self, dtype: torch.dtype, softcap: bool = True):
        super().__init__(layers=[])
        self._dtype = dtype
        self._softcap = softcap
        self._prompts: list[tuple[Tensor, Tensor]] = []
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt_lengths: list[int] = []
        self._owners: list[int] = []
        self._starts: list[int] = []
        self._column = 0  # where the next token of every row goes
        self.capacity = 0
        self.row_capacity = 0
        self.attended = 0
        """Layers that have read the cache in the current step."""
        self._seating: SlotMap | None = None  # None: rows have come or gone since
        self._fixed_seating: SlotMap | None = None
        self._fixed_column: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows being decoded."""
        return len(self._owners)

    # ---- rows and groups come and go -------------------------------------------------------------------------------

    def add_groups(self, prefilled: Cache | None, lengths: list[int]) -> list[int]:
        """Take in prompts.

        Args:
            prefilled: a cache of right-padded prompts, or None when they are all empty.
            lengths: tokens of each.

        Returns:
            A handle for each, for `add_rows`; valid until rows leave.
        """
        first = len(self._prompt_lengths)
        self._prompt_lengths += lengths
        if prefilled is None:
            added = [(_nothing_like(k, len(lengths)), _nothing_like(v, len(lengths))) for k, v in self._prompts]
        else:
            added = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in keys_and_values(prefilled)]
        if added:
            self._prompts = self._prompts or [(_nothing_like(k, first), _nothing_like(v, first)) for k, v in added]
            self._prompts = [
                (_stack(old[0], new[0], first, self._dtype), _stack(old[1], new[1], first, self._dtype))
                for old, new in zip(self._prompts, added, strict=True)
            ]
        self._seating = None
        return list(range(first, len(self._prompt_lengths)))

    def add_rows(
        self, groups: list[int], own: list[tuple[Tensor, Tensor]] | None = None, lengths: list[int] | None = None
    ) -> None:
        """Start rows after the prompts of `groups`.

        Args:
            groups: the handle of each row's group.
            own: what the rows hold after their prompts, left-aligned: keys and values `[rows, kv_heads, T, head_dim]`
                per layer. None: nothing yet.
            lengths: tokens of `own` that count, per row.
        """
        lengths = lengths or [0] * len(groups)
        longest = max(lengths)
        self._make_room(longest, len(groups))
        places = slice(self.rows, self.rows + len(groups))
        self._owners += groups
        self._starts += [self._column - length for length in lengths]
        self._seating = None
        if own is None or not longest:
            return
        ends = torch.tensor(lengths, device=own[0][0].device)
        source = (torch.arange(longest, device=ends.device) - (longest - ends[:, None])).clamp_(min=0)
        source = source[:, None, :, None]
        for layer, new in enumerate(own):
            for stored, x in zip(self._storage(layer, new), new, strict=True):
                aligned = x.gather(2, source.expand(-1, x.shape[1], -1, x.shape[3]))
                stored[places, :, self._column - longest : self._column] = aligned.to(self._dtype)

    def move(self, moves: list[tuple[int, int]], rows: int) -> None:
        """Copy rows (source, target), keep the first `rows`, and forget prompts that no row needs any more."""
        _copy(self._own.values(), moves, slice(self._first, self._column))
        for source, target in moves:
            self._owners[target] = self._owners[source]
            self._starts[target] = self._starts[source]
        del self._owners[rows:], self._starts[rows:]
        if not rows:
            self._column = 0
        used = sorted(set(self._owners))
        if len(used) < len(self._prompt_lengths):
            self._prompt_lengths = [self._prompt_lengths[group] for group in used]
            width = max(self._prompt_lengths, default=0)
            self._prompts = [(k[:, used, :width], v[:, used, :width]) for k, v in self._prompts]
            renamed = {group: place for place, group in enumerate(used)}
            self._owners = [renamed[group] for group in self._owners]
        self._seating = None

    @property
    def _first(self) -> int:
        """The first column that any row uses."""
        return min(self._starts, default=self._column)

    def _make_room(self, before: int, rows: int) -> None:
        """Room for `rows` more rows that hold `before` tokens each, and for one more column."""
        shift = max(0, before - self._column)
        needed = self._column + shift + 1
        tokens = self.capacity if needed <= self.capacity else max(needed, 2 * self.capacity)
        self._rebuild(tokens, max(self.row_capacity, self.rows + rows), shift)

    def _next_column(self) -> None:
        """Make the current column writable: move everything left where half of the columns are unused, else grow.

        What grows has room only for the rows that are still there: the longest completions are few.
        """
        if self._column < self.capacity:
            return
        first = self._first
        if 2 * first >= self.capacity:
            self._rebuild(self.capacity, self.row_capacity, -first)
        else:
            self._rebuild(2 * self.capacity, self.rows, 0)

    def _rebuild(self, tokens: int, rows: int, shift: int) -> None:
        """Capacities of at least these, with what is stored `shift` columns further right."""
        tokens = -(-tokens // GRANULE) * GRANULE
        if (tokens, rows, shift) == (self.capacity, self.row_capacity, 0):
            return
        first, column, used = self._first, self._column, self.rows
        for layer, pair in self._own.items():
            moved = []
            for old in pair:
                new = old.new_zeros(rows, old.shape[1], tokens, old.shape[3])
                new[:used, :, first + shift : column + shift] = old[:used, :, first:column]
                moved.append(new)
            self._own[layer] = (moved[0], moved[1])
        self.capacity, self.row_capacity = tokens, rows
        self._starts = [start + shift for start in self._starts]
        self._column += shift
        self._seating = None

    def _storage(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A layer's tensors, made on first use. Zeros, because masked garbage could be NaN."""
        if layer not in self._own:
            room = (self.row_capacity, self.capacity)
            keys, values = (x.new_zeros(room[0], x.shape[1], room[1], x.shape[3], dtype=self._dtype) for x in like)
            self._own[layer] = (keys, values)
        return self._own[layer]

    # ---- a decoding step -------------------------------------------------------------------------------------------

    def begin_step(self, positions: Tensor, config: Any) -> Any:
        """Open a column for the next token of every row; returns the additive mask(s) the model's layers need.

        Args:
            positions: [rows] int64, of the tokens about to be computed.
            config: the model's text config: it names the sliding window and the kinds of layer.

        Returns:
            [rows, 1, 1, prompt + columns], or a dict of such by layer type for models that mix them.
        """
        self.open_column()
        if self._seating is None:
            self._seating = self._new_seating(positions.device, self.rows, 1)
        return self.masks(positions, config)

    def open_column(self) -> None:
        """Make a column writable for the next token of every row."""
        self._next_column()
        self._seen_from, self._column = self._first, self._column + 1
        self.attended = 0

    def begin_fixed_step(self, rows: int, device: torch.device) -> tuple[Any, ...]:
        """The same for a step whose tensors have fixed shapes and places, so that it can be recorded and replayed.

        `rows`, or all that there is room for, are computed, those in use first, over the whole capacity; `masks` then
        belongs into the recording.

        Returns:
            What the recording depends on, the number of rows first: while it is equal, a recorded step may be replayed.
        """
        self.open_column()
        rows = min(rows, self.row_capacity)
        if self._seating is None or self._fixed_column is None:
            seats = 1 << (max(map(self._owners.count, set(self._owners))) - 1).bit_length()
            seating = self._new_seating(device, rows, seats)
            if self._fixed_seating is not None and self._fixed_seating.accepts(seating):
                self._fixed_seating.copy_(seating)
            else:
                self._fixed_seating = seating
            self._seating = self._fixed_seating
            if self._fixed_column is None:
                self._fixed_column = torch.zeros(1, dtype=torch.int64, device=device)
        self._fixed_column.fill_(self._column - 1)
        stored = [x.data_ptr() for pair in (*self._prompts, *self._own.values()) for x in pair]
        return rows, self.capacity, id(self._seating), tuple(stored)

    def end_fixed_steps(self) -> None:
        """Back to shapes that follow the rows; the column just opened is closed again."""
        self._seating = self._fixed_seating = self._fixed_column = None
        self._column -= 1

    def masks(self, positions: Tensor, config: Any) -> Any:
        """The mask(s) of `begin_step`, from tensors alone."""
        assert self._seating is not None, "a step has begun"
        seating = self._seating
        fixed = self._fixed_column is not None
        self._everything_seen = seating.uniform and not fixed and not getattr(config, "sliding_window", None)
        columns = (0, self.capacity) if fixed else (self._seen_from, self._column)
        own = torch.arange(*columns, device=positions.device)
        starts, lengths = seating.starts[:, None], seating.lengths[:, None]
        of_prompt = torch.arange(seating.width, device=positions.device)
        token_positions = torch.cat([of_prompt.expand(len(starts), -1), own - starts + lengths], dim=1)
        written = own >= starts
        if self._fixed_column is not None:
            written &= own <= self._fixed_column
        exists = torch.cat([of_prompt < lengths, written], dim=1)
        return additive_masks(token_positions, exists, positions, config, self._dtype)

    def _new_seating(self, device: torch.device, rows: int, least_seats: int) -> SlotMap:
        width = self._prompts[0][0].shape[2] if self._prompts else 0
        return SlotMap.of(self._owners, self._prompt_lengths, self._starts, width, rows, least_seats, device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per row (`[rows, kv_heads, 1, head_dim]`); returns the rows' own keys and values so far.

        They are `[rows, kv_heads, columns, head_dim]`, without the prompts: only `forked_attention` reads them.
        """
        rows = key_states.shape[0]
        stored = self._storage(layer_idx, (key_states, value_states))
        for tensor, new in zip(stored, (key_states, value_states), strict=True):
            if self._fixed_column is not None:
                tensor[:rows].index_copy_(2, self._fixed_column, new.to(self._dtype))
            else:
                tensor[:rows, :, self._column - 1] = new[:, :, 0]
        columns = slice(None) if self._fixed_column is not None else slice(self._seen_from, self._column)
        return stored[0][:rows, :, columns], stored[1][:rows, :, columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen by the longest row before this step."""
        return self._column

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One query per row over its group's prompt and its own tokens, in one softmax.

        Args:
            layer: whose prompts.
            query: [rows, heads, 1, D], scaled.
            keys, values: [rows, kv_heads, columns, D], D of the values maybe another, as `update` gave them.
            mask: [rows, 1, 1, prompt + columns] additive.
            softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).
            sinks: [heads] one more score per head that takes probability and gives nothing (gpt-oss).

        Returns:
            [rows, 1, heads, D], D of the values.
        """
        self.attended += 1
        rows, heads, _, dim = query.shape
        kv_heads = keys.shape[1]
        query = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        assert self._seating is not None, "a step has begun"
        width = self._seating.width
        scores = query @ keys.transpose(2, 3)
        if width:
            prompt_keys, prompt_values = (x[:, :, :width] for x in self._prompts[layer])
            scores = torch.cat([self._of_rows(self._of_groups(query) @ prompt_keys.transpose(2, 3)), scores], dim=-1)
        if softcap and self._softcap:
            scores = torch.tanh(scores / softcap) * softcap
        weights = self._softmax(scores, mask, sinks).to(values.dtype)
        out = weights[..., width:] @ values
        if width:
            out += self._of_rows(self._of_groups(weights[..., :width]) @ prompt_values)
        return out.reshape(rows, 1, heads, -1)

    def _softmax(self, scores: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        """[rows, kv, per kv, width] scores -> weights, in float32 at least."""
        if not self._everything_seen:
            scores = scores + mask
        dtype = torch.promote_types(scores.dtype, torch.float32)
        if sinks is None:
            return scores.softmax(-1, dtype=dtype)
        sink = sinks.to(scores.dtype).view(*scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
        return torch.cat([scores, sink], dim=-1).softmax(-1, dtype=dtype)[..., :-1]

    def _of_groups(self, x: Tensor) -> Tensor:
        """[rows, kv, per kv, n] -> [kv, groups, seats * per kv, n]."""
        assert self._seating is not None, "a step has begun"
        if not self._seating.aligned:
            x = x.index_select(0, self._seating.table)
        x = x.transpose(0, 1)
        return x.reshape(x.shape[0], -1, self._seating.seats * x.shape[2], x.shape[3])

    def _of_rows(self, x: Tensor) -> Tensor:
        """The way back."""
        assert self._seating is not None, "a step has begun"
        x = x.view(x.shape[0], x.shape[1] * self._seating.seats, -1, x.shape[3]).transpose(0, 1)
        return x if self._seating.aligned else x.index_select(0, self._seating.order)


def _nothing_like(x: Tensor, groups: int) -> Tensor:
    """Prompts without tokens."""
    return x.new_zeros(x.shape[0], groups, 0, x.shape[3])


def _stack(old: Tensor, new: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """`groups` prompts [kv, groups, width, D] with new ones behind them, as wide as the widest."""
    width = max(old.shape[2], new.shape[2])
    stacked = new.new_zeros(new.shape[0], groups + new.shape[1], width, new.shape[3], dtype=dtype)
    stacked[:, :groups, : old.shape[2]] = old
    stacked[:, groups:, : new.shape[2]] = new
    return stacked


def _copy(pairs: Any, moves: list[tuple[int, int]], columns: slice) -> None:
    if moves:
        sources, targets = (list(places) for places in zip(*moves, strict=True))
        for pair in pairs:
            for stored in pair:
                stored[targets, :, columns] = stored[sources, :, columns]


def forked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    forked: ForkedCache | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`ForkedCache.attend` as transformers calls attention; plain SDPA without `forked`."""
    if forked is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return forked.attend(module.layer_idx, query, key, value, attention_mask, softcap, s_aux), None  # type: ignore[arg-type]


AttentionInterface.register(FORKED_ATTENTION, forked_attention)
AttentionMaskInterface.register(FORKED_ATTENTION, sdpa_mask)
