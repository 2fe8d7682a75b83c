"""Given tokens after prompts that are computed already: all their positions in one parallel pass, in bounded memory.

This is how drafts are verified and given completions scored. The prompt's keys and values are read from the prefill,
once per group and chunk; the logits never exist for more than a tile of positions. Not here: which tokens to accept.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from covey.core.model_architecture import decoder_of
from covey.engines.native.cache_common import additive_masks, keys_and_values

TILE = 1 << 24
"""Most logits that exist at once."""


class Extension(Cache):
    """Keys and values of the given tokens, which attend to their row's prompt and to themselves.

    Args:
        prefilled: right-padded prompts, or None when they are all empty.
        owners: [rows] int64, which prompt each row continues.
    """

    def __init__(self, prefilled: Cache | None, owners: Tensor):
        super().__init__(layers=[])
        self._prompts = [] if prefilled is None else keys_and_values(prefilled)
        self._owners = owners
        self.own: list[tuple[Tensor, Tensor]] = []
        """Per layer, `[rows, kv_heads, T, head_dim]` keys and values."""

    @property
    def prompt_width(self) -> int:
        """Tokens of the longest prompt."""
        return self._prompts[0][0].shape[2] if self._prompts else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the new tokens' keys and values; returns them behind their prompts'."""
        self.own.append((key_states, value_states))
        if not self._prompts:
            return key_states, value_states
        keys, values = (x[self._owners].to(key_states.dtype) for x in self._prompts[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the given ones."""
        return self.prompt_width


def extend(
    model: Any, prefilled: Cache | None, prompts: list[list[int]], owners: list[int], tokens: list[list[int]]
) -> tuple[Tensor, Extension]:
    """Compute the positions that predict `tokens`.

    Args:
        model: a transformers causal language model in inference mode.
        prefilled: the prompts without their last tokens, right-padded, computed.
        prompts: the prompts in full.
        owners: for each row the prompt it continues.
        tokens: what each row continues it with, at least one token.

    Returns:
        Hidden states [sum of lengths, H] in row order, state i of a row predicting its token i, and the cache, which
        holds each row's last prompt token and its tokens but the last.
    """
    device = next(model.parameters()).device
    inputs = [[prompts[owner][-1], *row[:-1]] for owner, row in zip(owners, tokens, strict=True)]
    width = max(len(row) for row in inputs)
    ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in inputs], device=device)
    before = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    owner = torch.tensor(owners, device=device)
    cache = Extension(prefilled, owner)
    before = before[owner][:, None]
    positions = before + torch.arange(width, device=device)
    of_prompt = torch.arange(cache.prompt_width, device=device).expand(len(inputs), -1)
    exists = torch.cat([of_prompt < before, torch.ones_like(positions, dtype=torch.bool)], dim=1)
    config = model.config.get_text_config()
    masks = additive_masks(torch.cat([of_prompt, positions], dim=1), exists, positions, config, compute_dtype(model))
    hidden = decoder_of(model)(
        input_ids=ids, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=True
    ).last_hidden_state
    lengths = torch.tensor([len(row) for row in inputs], device=device)
    return hidden[torch.arange(width, device=device) < lengths[:, None]], cache


def logit_tiles(model: Any, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of hidden states [N, H] as the model computes them, a few rows at a time: (rows, [n, V])."""
    logits_of = _head(model)
    vocabulary = model.config.get_text_config().vocab_size
    rows = max(1, TILE // vocabulary)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        yield part, logits_of(hidden[part])


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """hidden [n, H] -> logits [n, V], with the model's scale and soft-capping."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = head(hidden) * scale if scale != 1.0 else head(hidden)
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of


def compute_dtype(model: Any) -> torch.dtype:
    """What the model multiplies in here and now."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
