"""Tiny real components for tests: a character tokenizer with a chat template and random causal language models.

Nothing is mocked: these are transformers models and tokenizers, just small.
"""

import copy
import functools
import gc
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}{% if not loop.last or"
    " m['role'] != 'assistant' %}<eos>{% elif not continue_final_message|default(false) %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def quick() -> None:
    """Make this process fast with tiny models: one thread, and collections of garbage that leave out what is imported.

    A trainer collects garbage when it starts; going through all that is imported takes up to half a second.
    """
    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # else every seed keeps a printed stack for a GPU that never starts
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
    gc.collect()
    gc.freeze()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def config(**changes: Any) -> LlamaConfig:
    """A two-layer Llama over the tokenizer's vocabulary."""
    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(string.printable),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**settings, **changes})


def model(seed: int = 0, scale: float = 5.0, **changes: Any) -> LlamaForCausalLM:
    """A random model whose distribution is far from uniform."""
    made, random_state = _first(seed, scale, torch.get_default_dtype(), tuple(changes.items()))
    torch.set_rng_state(random_state)
    return copy.deepcopy(made)


@functools.cache
def _first(seed: int, scale: float, dtype: torch.dtype, changes: tuple[Any, ...]) -> tuple[Any, torch.Tensor]:
    """The model that others are copies of, which takes half the time, and what its initialisation left of the seed."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(config(**dict(changes))).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return made, torch.get_rng_state()


def folder(path: Path, **changes: Any) -> str:
    """A model and its tokenizer saved as users have them."""
    model(**changes).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def rows(count: int = 8, conversational: bool = False) -> list[dict[str, Any]]:
    """Prompts with an answer column."""

    def prompt(text: str) -> Any:
        return [{"role": "user", "content": text}] if conversational else text

    return [{"prompt": prompt(f"{i}+{i}="), "answer": str(2 * i)} for i in range(count)]
