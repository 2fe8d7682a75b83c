"""Tiny random decoders with a state that runs along the row: linear attention, convolutions, state spaces, hybrids."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

STATE_SPACE = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Qwen3Next": {
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3_5Text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "FalconH1": {"head_dim": 8, **STATE_SPACE, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "Jamba": {**STATE_SPACE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
}
"""Settings of each in addition to the sizes that all have."""

MASKED_WHOLE: dict[str, dict[str, Any]] = {
    "Bloom": {},
    "Falcon": {"alibi": True},
    "Llama4": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 4,
    },
}
"""Models without a state whose rows cannot be masked one by one: biases from a mask of whole rows, chunks."""

SIZES = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def model(name: str) -> Any:
    """One over the test tokenizer's vocabulary, whose distribution is not uniform."""
    torch.manual_seed(0)
    kind = "Llama4Text" if name == "Llama4" else name
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **{**SETTINGS, **MASKED_WHOLE}[name]})
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=0.1)
    return made
