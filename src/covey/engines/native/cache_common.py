"""What the engine's caches have in common: masks of tokens that sit anywhere, and the contents of a prefill.

A mask is made from the position of each stored token, so a cache may lay its tokens out as it likes.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def additive_masks(
    token_positions: Tensor, exists: Tensor, query_positions: Tensor, config: Any, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Causal masks, within the model's sliding window where a layer has one.

    Args:
        token_positions: [rows, width] int64, the position of each stored token.
        exists: [rows, width] bool, False where nothing is stored.
        query_positions: [rows] or [rows, T] int64.
        config: the model's text config: it names the sliding window and the kinds of layer.
        dtype: of the mask.

    Returns:
        [rows, 1, T, width], 0 where seen and the type's minimum where not; a dict of such by layer type for models
        that mix them.
    """
    if query_positions.dim() == 1:
        query_positions = query_positions[:, None]
    back = query_positions[:, :, None] - token_positions[:, None]
    causal = (back >= 0) & exists[:, None]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    sliding = causal & (back < window) if window else causal
    if len(kinds) > 1:
        return {kind: _additive(sliding if kind == "sliding_attention" else causal, dtype) for kind in kinds}
    uses_window = "sliding_attention" in kinds if kinds else window is not None
    return _additive(sliding if uses_window else causal, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def keys_and_values(prefilled: Cache) -> list[tuple[Tensor, Tensor]]:
    """Per layer, `[prompts, kv_heads, width, head_dim]` each."""
    layers: list[Any] = list(prefilled.layers)
    return [(layer.keys, layer.values) for layer in layers]
