"""Tiny random mixtures of experts over the test tokenizer's vocabulary."""

from typing import Any

import torch
import transformers

from tests.support import hybrids

SETTINGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
"""Settings of each in addition to the sizes that all have."""


def model(name: str, **changes: Any) -> Any:
    """One whose distribution and routing are far from uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**hybrids.SIZES, **SETTINGS[name], **changes})
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()  # `from_config` would leave shares under ZeRO-3
    made.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return made
