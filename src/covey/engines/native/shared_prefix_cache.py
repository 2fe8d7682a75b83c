"""Key/value cache in which the completions of a group share their prompt, and the attention that reads it.

Prompts are stored once per group, right-padded. The i-th sampled token of a sequence is stored in column i, and a mask
hides the columns after a sequence's last token. Prompts and sampled tokens are never concatenated, so each prompt is
read once per step for all its sequences. The order in which attention adds up a sequence's tokens does not depend on
other sequences; on a CPU the sizes of products are chosen such that neither longer sequences nor their number change a
bit (`AttentionSizes`). No model is patched: the attention function is registered with transformers and receives the
cache in the keyword argument `prefix_cache` of the model's forward pass.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from covey.engines.native.invariance import CHUNK, AttentionShape, AttentionSizes, elementwise
from covey.engines.native.prefill import KeysAndValues, additive_masks, keys_and_values

SHARED_PREFIX_ATTENTION = "covey_shared_prefix"  # attention implementation of a decoding step
GRANULE = 64  # capacities in tokens are multiples of this


@dataclass(slots=True)
class SlotMap:
    """Assignment of sequences to slots, equally many per group; valid until sequences are added or removed."""

    table: Tensor  # [groups * slots] index of the sequence in each slot; 0 in an empty slot, computed and never read
    order: Tensor  # [S] slot of each sequence
    lengths: Tensor  # [S] tokens of the sequence's prompt
    slots: int  # slots per group
    width: int  # columns of the stored prompts that are read
    aligned: bool  # True if slot i holds sequence i for all i
    filled: bool  # True if every prompt has `width` tokens

    @classmethod
    def of(
        cls, owners: list[int], prompt_lengths: list[int], width: int, size: int, slots: int, device: torch.device
    ) -> "SlotMap":
        """Slots for sequences in the groups `owners`, as tensors for `size` sequences, of which the last may be idle.

        Example: owners [0, 1, 0] with two slots per group give the table [0, 2 | 1, 0] and the order [0, 2, 1].
        """
        table = [0] * (slots * len(prompt_lengths))
        free = list(range(0, len(table), slots))  # next slot of each group
        order, lengths = [0] * size, [0] * size
        for sequence, group in enumerate(owners):
            order[sequence], lengths[sequence] = free[group], prompt_lengths[group]
            table[free[group]] = sequence
            free[group] += 1
        tensor = partial(torch.tensor, device=device)
        return cls(
            table=tensor(table),
            order=tensor(order),
            lengths=tensor(lengths),
            slots=slots,
            width=width,
            aligned=order == list(range(len(table))),
            filled=set(prompt_lengths) == {width},
        )

    def accepts(self, other: "SlotMap") -> bool:
        """True if a CUDA graph captured with this map is valid for the contents of the other."""
        own, others = ((x.slots, x.width, x.table.shape, x.order.shape) for x in (self, other))
        return own == others

    def copy_(self, other: "SlotMap") -> None:
        for name in ("table", "order", "lengths"):
            getattr(self, name).copy_(getattr(other, name))

    def to_slots(self, x: Tensor) -> Tensor:
        """[S, kv_heads, q, n] -> [kv_heads, groups, slots * q, n], q query heads per key/value head."""
        x = (x if self.aligned else x.index_select(0, self.table)).transpose(0, 1)
        return x.reshape(x.shape[0], -1, self.slots * x.shape[2], x.shape[3])

    def from_slots(self, x: Tensor) -> Tensor:
        """Inverse of `to_slots`: [kv_heads, groups, slots * q, n] -> [S, kv_heads, q, n]."""
        x = x.view(x.shape[0], x.shape[1] * self.slots, -1, x.shape[3]).transpose(0, 1)
        return x if self.aligned else x.index_select(0, self.order)


class SharedPrefixCache(Cache):
    """Keys and values of groups of sequences being decoded, stored in attention's `dtype`.

    Per layer the prompts are `[kv_heads, groups, prompt, head_dim]`, read once for all sequences of a group, and
    sampled tokens `[sequences, kv_heads, columns, head_dim]`, so that products read both without copies. `softcap` is
    False if the model's own attention ignores soft-capping, as transformers' SDPA does. With `sizes`, the sizes of
    products are chosen such that a sequence's bits do not depend on other sequences.
    """

    shares_prompts = True  # True: `attend` reads the cache; False: the model's attention reads what `update` returns

    def __init__(self, dtype: torch.dtype, softcap: bool = True, sizes: AttentionSizes | None = None):
        super().__init__(layers=[])
        self._sizes = sizes
        self.shapes: set[AttentionShape] = set()  # of the layers that have read the cache
        self._dtype = dtype
        self._softcap = softcap
        self._prompts: KeysAndValues = []
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt_lengths: list[int] = []
        self._owners: list[int] = []
        self._counts: list[int] = []  # own tokens of each sequence, the current step's included
        self.capacity = self.sequence_capacity = 0
        self.least_capacity = 0  # smallest capacity in tokens
        self.attended = 0  # layers that have read the cache in the current step
        self._slot_map: SlotMap | None = None  # None: to be made, because sequences were added or removed
        self._fixed_slot_map: SlotMap | None = None
        self._fixed = False  # steps have tensors of fixed shapes and addresses
        self._columns: Tensor | None = None  # [S] of the current step's tokens
        self._column: int | None = None  # the column of all current tokens; None: columns differ, or shapes are fixed
        self._width = 0  # number of columns of sampled tokens that are read
        self.fused = False  # attend by one kernel in steps of fixed shapes, if there is one and the layer is plain

    def add_groups(self, prefilled: Cache | None, lengths: list[int]) -> list[int]:
        """Store right-padded prompts (None if all are empty); the handles returned are valid until sequences leave."""
        first = len(self._prompt_lengths)
        self._prompt_lengths += lengths
        added = [] if prefilled is None else keys_and_values(prefilled)
        for layer in range(max(len(added), len(self._prompts))):
            new = added[layer] if added else None
            old = self._prompts[layer] if layer < len(self._prompts) else None
            keys = _stacked(old and old[0], new and new[0], first, len(lengths), self._dtype)
            values = _stacked(old and old[1], new and new[1], first, len(lengths), self._dtype)
            self._prompts[layer : layer + 1] = [(keys, values)]
        self._slot_map = None
        return list(range(first, len(self._prompt_lengths)))

    def add_sequences(
        self, groups: list[int], own: KeysAndValues | None = None, lengths: list[int] | None = None
    ) -> None:
        """Start sequences after the prompts of the handles `groups`.

        `own` has keys and values of tokens after the prompts, left-aligned `[S, kv_heads, T, head_dim]` per layer, of
        which the first `lengths` per sequence count; None if there are none yet.
        """
        lengths = lengths or [0] * len(groups)
        longest, size = max(lengths), len(self._owners)
        self._reserve(longest + 1, size + len(groups))
        self._owners += groups
        self._counts += lengths
        self._slot_map = None
        for layer, new in enumerate(own if own is not None and longest else ()):
            for stored, x in zip(self._storage(layer, new), new, strict=True):
                # columns after a sequence's tokens are masked until they are written
                stored[size : size + len(groups), :, :longest] = x[:, :, :longest].to(self._dtype)

    def move(self, moves: list[tuple[int, int]], size: int) -> None:
        """Copy sequences (source, target), then drop all but the first `size` and prompts without sequences."""
        if moves:
            sources, targets = map(list, zip(*moves, strict=True))
            longest = max(self._counts[source] for source in sources)
            for pair in self._own.values():
                for stored in pair:
                    stored[targets, :, :longest] = stored[sources, :, :longest]
        for source, target in moves:
            self._owners[target] = self._owners[source]
            self._counts[target] = self._counts[source]
        del self._owners[size:], self._counts[size:]
        used = sorted(set(self._owners))
        # A captured step reads all stored prompts, so prompts without sequences stay until they are half of them.
        if len(used) < len(self._prompt_lengths) / (2 if self._fixed else 1):
            self._prompt_lengths = list(map(self._prompt_lengths.__getitem__, used))
            width = stored_width(max(self._prompt_lengths, default=0))
            self._prompts = [(k[:, used, :width], v[:, used, :width]) for k, v in self._prompts]
            self._owners = list(map(used.index, self._owners))
        self._slot_map = None

    def _reserve(self, tokens: int, size: int) -> None:
        """Reserve capacity for `size` sequences of `tokens` tokens; it doubles, which bounds the cost of copying."""
        tokens = self.capacity if tokens <= self.capacity else max(tokens, 2 * self.capacity)
        self._rebuild(tokens, max(self.sequence_capacity, size))

    def _rebuild(self, tokens: int, size: int) -> None:
        """Set capacities of at least these numbers, and keep the contents."""
        tokens = stored_width(max(tokens, self.least_capacity))
        if (tokens, size) == (self.capacity, self.sequence_capacity):
            return
        used, longest = len(self._owners), max(self._counts, default=0)
        for layer, pair in self._own.items():
            moved = []
            for old in pair:
                new = old.new_zeros(size, old.shape[1], tokens, old.shape[3])
                new[:used, :, :longest] = old[:used, :, :longest]
                moved.append(new)
            self._own[layer] = (moved[0], moved[1])
        self.capacity, self.sequence_capacity = tokens, size
        self._slot_map = None

    def _storage(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Tensors of a layer, allocated on first use and filled with zeros: masked NaN would still be NaN."""
        if layer not in self._own:
            size, tokens = self.sequence_capacity, self.capacity
            keys, values = (x.new_zeros(size, x.shape[1], tokens, x.shape[3], dtype=self._dtype) for x in like)
            self._own[layer] = (keys, values)
        return self._own[layer]

    def begin_step(self, positions: Tensor, config: Any) -> Any:
        """Open a column for tokens at `positions` [S]; returns the additive mask(s) [S, 1, 1, prompt + columns]."""
        self.open_columns()
        longest = max(self._counts)
        self._column = longest - 1 if min(self._counts) == longest else None
        self._width = longest
        if self._sizes is not None:
            self._width = self._sizes.columns(longest, len(self._owners))
            self._reserve(self._width, len(self._owners))
        if self._slot_map is None:
            self._slot_map = self._new_slot_map(positions.device, len(self._owners), 1)
        return self.masks(positions, config)

    def open_columns(self) -> None:
        """Make a column writable for the next token of every sequence.

        At full capacity, the capacity in tokens doubles, and the capacity in sequences shrinks to the current number,
        because few completions are long.
        """
        if max(self._counts) >= self.capacity:
            self._rebuild(2 * self.capacity, len(self._owners))
        self._counts = [count + 1 for count in self._counts]
        self.attended = 0

    def begin_fixed_step(self, size: int, device: torch.device) -> tuple[Any, ...]:
        """Open a column for a step with tensors of fixed shapes and addresses, which can be captured and replayed.

        `size` sequences (or the capacity, if smaller) are computed over the whole capacity, sequences in use first; the
        capture must include `masks`. Returns a key that begins with the number of sequences: as long as it is equal, a
        captured step may be replayed.
        """
        self.open_columns()
        size = min(size, self.sequence_capacity)
        if self._slot_map is None or not self._fixed:
            slots = 1 << (max(map(self._owners.count, set(self._owners))) - 1).bit_length()
            last = self._fixed_slot_map
            if last is not None and len(last.table) == last.slots * len(self._prompt_lengths):
                slots = max(slots, last.slots)  # as in the last capture
            slot_map = replace(self._new_slot_map(device, size, slots), aligned=False)  # it may change
            if last is not None and last.accepts(slot_map):
                last.copy_(slot_map)
            else:
                self._fixed_slot_map = slot_map
            self._slot_map, self._fixed = self._fixed_slot_map, True
        self._column, self._width = None, self.capacity
        stored = [x.data_ptr() for pair in (*self._prompts, *self._own.values()) for x in pair]
        return size, self.capacity, id(self._slot_map), tuple(stored)

    def end_fixed_steps(self) -> None:
        """End steps of fixed shapes: shapes follow the sequences again, and the column just opened is closed."""
        self._slot_map = self._fixed_slot_map = None
        self._fixed = self.fused = False
        self._counts = [count - 1 for count in self._counts]

    def masks(self, positions: Tensor, config: Any) -> Any:
        """The mask(s) of `begin_step`, computed from tensors only, so that the computation can be captured."""
        assert self._slot_map is not None, "a step has begun"
        slot_map = self._slot_map
        self._windowed = bool(getattr(config, "sliding_window", None))
        self._everything_visible = slot_map.filled and self._column == self._width - 1 and not self._windowed
        own = torch.arange(self._width, device=positions.device)
        lengths = slot_map.lengths[:, None]
        self._columns = positions - slot_map.lengths
        of_prompt = torch.arange(slot_map.width, device=positions.device)
        token_positions = torch.cat([of_prompt.expand(len(lengths), -1), own + lengths], dim=1)
        exists = torch.cat([of_prompt < lengths, own <= self._columns[:, None]], dim=1)
        return additive_masks(token_positions, exists, positions, config, self._dtype)

    def _new_slot_map(self, device: torch.device, size: int, least_slots: int) -> SlotMap:
        width = self._prompts[0][0].shape[2] if self._prompts else 0
        longest = max(self._prompt_lengths, default=0)
        slots = max([least_slots, *Counter(self._owners).values()])
        width = min(width, longest)
        if width and self._sizes is not None:
            width, slots = self._sizes.prompts(longest, slots, len(self._prompt_lengths))
            missing = width - self._prompts[0][0].shape[2]
            if missing > 0:
                self._prompts = [
                    (nn.functional.pad(k, (0, 0, 0, missing)), nn.functional.pad(v, (0, 0, 0, missing)))
                    for k, v in self._prompts
                ]
        return SlotMap.of(self._owners, self._prompt_lengths, width, size, slots, device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token per sequence (`[S, kv_heads, 1, D]`); returns keys and values of all sampled tokens."""
        size = key_states.shape[0]
        stored = self._storage(layer_idx, (key_states, value_states))
        assert self._columns is not None, "a step has begun"
        for tensor, new in zip(stored, (key_states, value_states), strict=True):
            if self._column is not None:
                tensor[:size, :, self._column] = new[:, :, 0]
            else:
                place = self._columns[:, None, None, None].expand(new.shape)
                tensor[:size].scatter_(2, place, new.to(self._dtype))
        return stored[0][:size, :, : self._width], stored[1][:size, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._counts, default=0)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    ) -> Tensor:
        """Attend with one scaled query per sequence to its prompt and own tokens, in one softmax of float32 or wider.

        queries [S, heads, 1, D], keys and values [S, kv_heads, columns, D] from `update`, additive mask [S, 1, 1,
        prompt + columns] -> [S, 1, heads, D of the values]. `softcap`: scores become softcap * tanh(scores / softcap)
        (Gemma 2, arXiv 2408.00118); `sinks` [heads]: one more score per head that takes a share of the probability and
        has no value (gpt-oss).
        """
        self.attended += 1
        size, heads, _, dim = query.shape
        kv_heads = keys.shape[1]
        self.shapes.add(AttentionShape(heads // kv_heads, kv_heads, dim, values.shape[3]))
        query = query.reshape(size, kv_heads, heads // kv_heads, dim)
        assert self._slot_map is not None and self._columns is not None, "a step has begun"
        slot_map, width = self._slot_map, self._slot_map.width
        if width and not softcap and sinks is None and self._fuses(query, keys, values):
            from covey.engines.native.decode_kernel import decode_attention

            prompt, own = self._prompts[layer], (keys, values)
            out = decode_attention(query.to(self._dtype), prompt, own, slot_map, self._columns)
            return out.reshape(size, 1, heads, -1)
        chunk = CHUNK if self._sizes is not None else max(width, keys.shape[2])
        parts = [matmul(query, k.transpose(2, 3)) for k in _chunks(keys, chunk)]
        if width:
            prompt_keys, prompt_values = (x[:, :, :width] for x in self._prompts[layer])
            in_slots = slot_map.to_slots(query)
            of_prompt = [matmul(in_slots, k.transpose(2, 3)) for k in _chunks(prompt_keys, chunk)]
            parts = [*map(slot_map.from_slots, of_prompt), *parts]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if softcap and self._softcap:
            scores = elementwise(torch.tanh, scores / softcap) * softcap
        if not self._everything_visible:
            scores = scores.add_(mask)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        if sinks is None:
            weights = scores.softmax(-1, dtype=dtype)
        else:
            sink = sinks.to(scores.dtype).view(*scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=dtype)[..., :-1]
        weights = weights.to(values.dtype)
        out = _weighted(matmul, weights[..., width:], values, chunk)
        if width:
            in_slots = slot_map.to_slots(weights[..., :width])
            out += slot_map.from_slots(_weighted(matmul, in_slots, prompt_values, chunk))
        return out.reshape(size, 1, heads, -1)

    def _fuses(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """True if one kernel attends: for a plain layer in half precision on a GPU, in a step of fixed shapes."""
        fixed = self.fused and self._fixed and not self._windowed
        if not fixed or not query.is_cuda or keys.shape[3] != values.shape[3] or find_spec("triton") is None:
            return False
        from covey.engines.native.decode_kernel import decode_kernel_works

        return decode_kernel_works(*query.shape[1:], self._dtype, query.device)


def stored_width(tokens: int) -> int:
    """Capacity in tokens for this many stored tokens."""
    return -(-tokens // GRANULE) * GRANULE


def _chunks(keys: Tensor, chunk: int) -> Sequence[Tensor]:
    """Parts of keys [..., columns, D] of `chunk` columns each; the last may be smaller."""
    return (keys,) if keys.shape[2] <= chunk else keys.split(chunk, dim=2)


def _weighted(matmul: Callable[[Tensor, Tensor], Tensor], weights: Tensor, values: Tensor, chunk: int) -> Tensor:
    """weights [..., columns] @ values [..., columns, D], added up chunk by chunk of columns."""
    if values.shape[2] <= chunk:
        return matmul(weights, values)
    out = matmul(weights[..., :chunk], values[:, :, :chunk])
    for start in range(chunk, values.shape[2], chunk):
        out += matmul(weights[..., start : start + chunk], values[:, :, start : start + chunk])
    return out


def _stacked(old: Tensor | None, new: Tensor | None, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Stored prompts `old` [kv_heads, first, width, D] and `new` ones [count, kv_heads, width, D]; None: all empty."""
    if old is None:
        assert new is not None, "one of them is given"
        old = new.new_zeros(new.shape[1], first, 0, new.shape[3])
    new = old.new_zeros(old.shape[0], count, 0, old.shape[3]) if new is None else new.transpose(0, 1)
    width = stored_width(max(old.shape[2], new.shape[2]))
    stacked = new.new_zeros(new.shape[0], first + count, width, new.shape[3], dtype=dtype)
    stacked[:, :first, : old.shape[2]] = old
    stacked[:, first:, : new.shape[2]] = new
    return stacked


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix_cache: SharedPrefixCache | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`SharedPrefixCache.attend` with the signature that transformers expects; plain SDPA without `prefix_cache`."""
    if prefix_cache is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return prefix_cache.attend(layer, query, key, value, attention_mask, softcap, s_aux), None


AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, sdpa_mask)
