"""Attention for rows with many sequences, registered with transformers as `covey_packed`; no model is patched.

transformers passes the keyword argument `token_tree` to every attention layer, also when checkpointing recomputes it.
Calls without it are ordinary: padded training, generation with a cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from covey.core.findings import CheckError
from covey.policy.attention.tree import TokenTree, merged_attention

PACKED_ATTENTION = "covey_packed"  # argument of `model.set_attn_implementation`

UNSUPPORTED = ("position_bias", "sinks", "indices", "block_indices", "block_sequence_ids")
"""Keyword arguments that change attention in ways the layouts do not support."""

PADDED = "Use attn_layout='padded'."


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    token_tree: TokenTree | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the sequences of a row, or an ordinary call without a token tree; [B, T, heads, D].

    query [B, heads, T, D], key and value [B, kv_heads, S, D]; with a tree B is 1, S is T and the mask is ignored.
    `softcap` soft-caps the scores; the sinks `s_aux` [heads] take a share of the probability. CheckError for layers
    whose attention does not support several sequences in a row.
    """
    if token_tree is None:
        # A mask of one element for many keys is the placeholder that packed layouts pass with their token tree.
        if attention_mask is not None and attention_mask.numel() == 1 and key.shape[2] > 1:
            raise CheckError.of(
                "model-layout",
                f"{type(module).__name__} did not receive the keyword arguments of the model's forward, which say where"
                " the sequences of a row end.",
                PADDED,
            )
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return _ordinary(query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None
    _check(module, kwargs)
    settings: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": _window(module, kwargs),
        "cap": softcap,
        "sinks": s_aux,
    }
    # Query, key and value need one dtype, which rotary embeddings may have changed: under autocast that of autocast.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if device == "cuda" and not dropout:
        from covey.policy.attention.flex import flex_tree_attention

        return flex_tree_attention(query, key, value, token_tree, **settings), None
    return merged_attention(query, key, value, token_tree, dropout=dropout, **settings), None


def _ordinary(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with explicit scores, for padded rows and generation where SDPA is not exact; [B, T, heads, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous()


def _check(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise CheckError.of(
                "model-layout",
                f"{type(module).__name__} calls attention with {name}, which rows of many sequences do not support.",
                PADDED,
            )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise CheckError.of("model-layout", f"{type(module).__name__} does not attend causally.", PADDED)
    if _layer_type(module) == "chunked_attention":
        raise CheckError.of("model-layout", f"{type(module).__name__} attends within fixed chunks.", PADDED)


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Sliding window of the layer in tokens, or None: the call's, else the config's (some models pass only a mask)."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"] or None
    config = getattr(module, "config", None)
    if _layer_type(module) not in (None, "sliding_attention") or getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None) or None


def _layer_type(module: nn.Module) -> str | None:
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return layer_types[layer] if layer_types and isinstance(layer, int) and layer < len(layer_types) else None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
