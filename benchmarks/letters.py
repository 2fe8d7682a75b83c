"""Tiny models with one token a letter: a tokenizer and a random Llama of two layers, which train whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
"""Settings of the models' configs."""


def vocabulary_of(letters: Sequence[str]) -> dict[str, int]:
    """Token ids: padding, the end, then the letters."""
    return {token: id for id, token in enumerate(["<pad>", "<eos>", *letters])}


def tokenizer(vocabulary: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """One token a letter."""
    made = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def tiny_llama(vocabulary: Mapping[str, int]) -> LlamaForCausalLM:
    """Two layers, random weights."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **SIZES))
