"""Attention over packed sequences, registered with transformers under its own name.

A packed forward pass lays sequences end to end in one row and says where they end in the keyword argument
`packed_lengths`, which transformers carries to every attention layer (also when gradient checkpointing recomputes
it). No model is patched: without that argument the function is plain SDPA.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "covey_packed"
"""What to give `model.set_attn_implementation`."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_lengths: list[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        module: the attention layer.
        query: [1, heads, T, D]; key, value: [1, kv_heads, T, D].
        attention_mask: ignored when `packed_lengths` is given.
        packed_lengths: tokens of each sequence, summing to T; None means an ordinary, unpacked call.
        sliding_window: how far back a token sees, or None for everything.

    Returns:
        [1, T, heads, D] and None.
    """
    if packed_lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("packed attention knows neither soft-capping nor attention sinks; use attn_layout='padded'")
    groups = query.shape[1] // key.shape[1]
    parts = zip(
        query.split(packed_lengths, dim=2),
        repeat_kv(key, groups).split(packed_lengths, dim=2),
        repeat_kv(value, groups).split(packed_lengths, dim=2),
        strict=True,
    )
    out = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, **_mask(q, sliding_window)
        )
        for q, k, v in parts
    ]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _mask(query: Tensor, window: int | None) -> dict[str, Any]:
    length = query.shape[2]
    if window is None or length <= window:
        return {"is_causal": True}
    place = torch.arange(length, device=query.device)
    back = place[:, None] - place
    return {"attn_mask": (back >= 0) & (back < window)}


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
