"""Parallel forward passes before decoding: computed prompts, tokens that continue them, and the masks of both."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from covey.core.model import decoder_of

MOST_LOGITS = 1 << 24
"""Most logits that exist at once."""

STORED_TOKENS = 1 << 14
"""Most prompt tokens in a `PrefixStore`."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


def keys_and_values(prefilled: Cache) -> KeysAndValues:
    """Per layer, `[prompts, kv_heads, width, head_dim]` each."""
    layers: list[Any] = list(prefilled.layers)
    return [(layer.keys, layer.values) for layer in layers]


def compute_dtype(model: Any) -> torch.dtype:
    """Dtype of the model's products, autocast included."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def additive_masks(
    token_positions: Tensor, exists: Tensor, query_positions: Tensor, config: Any, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Causal masks, within the sliding window in layers that have one, of tokens stored in any order.

    Args:
        token_positions: [S, width] int64, the position of each stored token.
        exists: [S, width] bool, False where nothing is stored.
        query_positions: [S] or [S, T] int64.
        config: the model's text config, with its sliding window and types of layers.
        dtype: of the mask.

    Returns:
        [S, 1, T, width], 0 where visible and the dtype's minimum elsewhere; a dict of them by layer type for models
        that mix types.
    """
    if query_positions.dim() == 1:
        query_positions = query_positions[:, None]
    distance = query_positions[:, :, None] - token_positions[:, None]
    causal = (distance >= 0) & exists[:, None]
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or [])
    sliding = causal & (distance < window) if window else causal
    if len(layer_types) > 1:
        return {kind: _additive(sliding if kind == "sliding_attention" else causal, dtype) for kind in layer_types}
    uses_window = "sliding_attention" in layer_types if layer_types else window is not None
    return _additive(sliding if uses_window else causal, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class ContinuationCache(Cache):
    """Keys and values of tokens that continue computed prompts; they attend to their prompt and to one another.

    Args:
        prefilled: right-padded prompts, or None when they are all empty.
        owners: [S] int64, index of the prompt that each sequence continues.
    """

    def __init__(self, prefilled: Cache | None, owners: Tensor):
        super().__init__(layers=[])
        self._prompts = [] if prefilled is None else keys_and_values(prefilled)
        self._owners = owners
        self.own: KeysAndValues = []
        """Per layer, `[S, kv_heads, T, head_dim]` keys and values of the continuations."""

    @property
    def prompt_width(self) -> int:
        """Tokens of the longest prompt."""
        return self._prompts[0][0].shape[2] if self._prompts else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; returns them behind their prompts'."""
        self.own.append((key_states, value_states))
        if not self._prompts:
            return key_states, value_states
        keys, values = (x[self._owners].to(key_states.dtype) for x in self._prompts[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the continuations."""
        return self.prompt_width


def continue_prompts(
    model: Any, prefilled: Cache | None, prompts: list[list[int]], owners: list[int], tokens: list[list[int]]
) -> tuple[Tensor, ContinuationCache]:
    """Compute all positions that predict `tokens`, given after computed prompts, in one forward pass.

    Args:
        model: a transformers causal language model in inference mode.
        prefilled: the prompts without their last tokens, right-padded, computed.
        prompts: the whole prompts.
        owners: per sequence the index of its prompt.
        tokens: per sequence its continuation, at least one token.

    Returns:
        Hidden states [sum of lengths, H] in order of sequences, state i of a sequence predicting its token i, and a
        cache of each sequence's last prompt token and its tokens but the last.
    """
    device = next(model.parameters()).device
    inputs = [[prompts[owner][-1], *continuation[:-1]] for owner, continuation in zip(owners, tokens, strict=True)]
    width = max(map(len, inputs))
    ids = torch.tensor([input_ids + input_ids[-1:] * (width - len(input_ids)) for input_ids in inputs], device=device)
    owner = torch.tensor(owners, device=device)
    cache = ContinuationCache(prefilled, owner)
    before = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)[owner][:, None]
    positions = before + torch.arange(width, device=device)
    of_prompt = torch.arange(cache.prompt_width, device=device).expand(len(inputs), -1)
    exists = torch.cat([of_prompt < before, torch.ones_like(positions, dtype=torch.bool)], dim=1)
    config = model.config.get_text_config()
    masks = additive_masks(torch.cat([of_prompt, positions], dim=1), exists, positions, config, compute_dtype(model))
    hidden = decoder_of(model)(
        input_ids=ids, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=True
    ).last_hidden_state
    lengths = torch.tensor([*map(len, inputs)], device=device)
    return hidden[torch.arange(width, device=device) < lengths[:, None]], cache


def logit_tiles(model: Any, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of hidden states [N, H], with the model's scale and soft-capping, a few at a time: (slice, [n, V])."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    size = max(1, MOST_LOGITS // config.vocab_size)
    for start in range(0, len(hidden), size):
        tile = slice(start, start + size)
        logits = head(hidden[tile]) * scale if scale != 1.0 else head(hidden[tile])
        yield tile, torch.tanh(logits / cap) * cap if cap else logits


class PrefixStore:
    """Computed prompts that later turns of the same conversations begin with, until the engine sleeps.

    The least recently used are removed first.

    Args:
        most_tokens: of all prompts together.
    """

    def __init__(self, most_tokens: int = STORED_TOKENS):
        self.most_tokens = most_tokens
        self.layers: dict[tuple[int, ...], KeysAndValues] = {}  # least recently used first

    def add(self, prompt: tuple[int, ...], prefilled: Cache | None, index: int) -> None:
        """Copy the keys and values of a prompt without its last token.

        Args:
            prompt: its tokens, or as many first tokens of it as are shared.
            prefilled: computed prompts without their last tokens; None if nothing was left of them.
            index: of this prompt among them.
        """
        if prompt in self.layers or prefilled is None or not 1 < len(prompt) <= self.most_tokens:
            return
        computed = slice(0, len(prompt) - 1)
        self.layers[prompt] = [
            (k[index, :, computed].clone(), v[index, :, computed].clone()) for k, v in keys_and_values(prefilled)
        ]
        while sum(map(len, self.layers)) > self.most_tokens:
            del self.layers[next(iter(self.layers))]

    def prefilled(self, prompts: list[tuple[int, ...]]) -> Cache:
        """Stored prompts without their last tokens, right-padded, as one cache."""
        cache = DynamicCache()
        width = max(map(len, prompts)) - 1
        stored = [self.layers.pop(prompt) for prompt in prompts]
        self.layers.update(zip(prompts, stored, strict=True))
        for number, layer in enumerate(zip(*stored, strict=True)):
            keys, values = zip(*layer, strict=True)
            cache.update(_padded(keys, width), _padded(values, width), number)
        return cache


def _padded(tensors: tuple[Tensor, ...], width: int) -> Tensor:
    """Tensors [kv_heads, tokens, D] -> [prompts, kv_heads, width, D], zeros on the right."""
    first = tensors[0]
    stacked = first.new_zeros(len(tensors), first.shape[0], width, first.shape[2])
    for index, tensor in enumerate(tensors):
        stacked[index, :, : tensor.shape[1]] = tensor
    return stacked
