"""Attention over packed sequences, registered with transformers under its own name.

A packed forward pass lays sequences end to end in one row and says where they end in a keyword argument
(`packed_lengths` or `shared_lengths`), which transformers carries to every attention layer (also when gradient
checkpointing recomputes it). No model is patched: without them the function is plain SDPA.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
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
    shared_lengths: list[tuple[int, list[int]]] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, or within each group that shares a prompt.

    Args:
        module: the attention layer.
        query: [1, heads, T, D]; key, value: [1, kv_heads, T, D].
        attention_mask: ignored when lengths are given.
        packed_lengths: tokens of each sequence, summing to T.
        shared_lengths: tokens of each prompt and of its completions, summing to T. Neither: an ordinary call.
        sliding_window: how far back a token sees, or None for everything.

    Returns:
        [1, T, heads, D] and None.

    Raises:
        ValueError: soft-capping or attention sinks, which these layouts do not know.
    """
    if packed_lengths is None and shared_lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("packed attention knows neither soft-capping nor attention sinks; use attn_layout='padded'")
    groups = shared_lengths or [(length, []) for length in packed_lengths or []]
    repeats = query.shape[1] // key.shape[1]
    lengths = [length for prompt, completions in groups for length in (prompt, *completions)]
    parts = zip(
        *(x.split(lengths, dim=2) for x in (query, repeat_kv(key, repeats), repeat_kv(value, repeats))), strict=True
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _mask(q.shape[2], k.shape[2], sliding_window, q.device)
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, **mask)

    out = []
    for _, completions in groups:
        q, prompt_k, prompt_v = next(parts)
        out.append(attend(q, prompt_k, prompt_v))
        for _ in completions:
            q, k, v = next(parts)
            out.append(attend(q, torch.cat([prompt_k, k], dim=2), torch.cat([prompt_v, v], dim=2)))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> dict[str, Any]:
    """Causal, the last query being the last key's; within the window, if any."""
    if queries == keys and (window is None or keys <= window):
        return {"is_causal": True}
    back = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return {"attn_mask": (back >= 0) & (back < (window or keys + 1))}


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
