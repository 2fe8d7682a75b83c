"""Models of real shapes with random weights, and a tokenizer of whole words: nothing is fetched from a hub."""

from typing import Any

from benchmarks.workloads import WORDS

SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHAT_TEMPLATE = "{% for m in messages %} {{ m['content'] }}{% endfor %}"

QWEN2: dict[str, Any] = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-0.5B": {
        **QWEN2,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        **QWEN2,
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        **QWEN2,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen3-MoE-small": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **QWEN2,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
"""Configurations as their makers published them, but for the names that end in "small" and for `tiny`."""


def config(name: str, **changes: Any) -> Any:
    """A transformers configuration of `SHAPES`."""
    from transformers import AutoConfig

    fields = {**SHAPES[name], **changes}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return AutoConfig.for_model(fields.pop("model_type"), **fields, **special)


def model(name: str, device: str = "cuda", dtype: Any = None, seed: int = 0, **changes: Any) -> Any:
    """A causal language model with random weights, made on `device`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config(name, **changes), dtype=dtype or torch.float32)


def tokenizer(vocab_size: int) -> Any:
    """One token per word; token ids without a word of their own are written `w<id>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *dict.fromkeys(WORDS.split())][:vocab_size]
    words += [f"w{i}" for i in range(len(words), vocab_size)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT_TEMPLATE, **names)
