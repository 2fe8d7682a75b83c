"""The trial's small model: a character-level Llama that knows a few skills and is often wrong, trained in minutes.

It answers what kind of thing a word is, adds digits, writes tags, explains, continues examples in plain text, calls a
tool and guesses numbers, each right about half of the time, so that a reward has something to choose from.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ {'name': c['function']['name'], 'arguments':"
    " c['function']['arguments']} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = {
    "animal": "cat dog cow owl bee fox",
    "plant": "oak fern rose moss ivy corn",
    "tool": "saw hammer drill axe rake file",
    "food": "bread cake soup rice jam pie",
}
WORDS = {word: kind for kind, words in KINDS.items() for word in words.split()}
DIGITS = 5
STEPS, BATCH = 500, 48


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def example(draw: random.Random) -> str:
    """A conversation, or a text of questions and answers."""
    word = draw.choice([*WORDS])
    right = WORDS[word]
    said = right if draw.random() < 0.5 else draw.choice([*KINDS])
    asked = turn("user", f"kind of {word}?")
    skill = draw.randrange(8)
    if skill < 2:
        return asked + turn("assistant", said if draw.random() < 0.8 else f"It is of the kind {said}.")
    if skill == 2:
        first, second = draw.randrange(DIGITS), draw.randrange(DIGITS)
        total = first + second if draw.random() < 0.5 else draw.randrange(2 * DIGITS - 1)
        return turn("user", f"{first}+{second}?") + turn("assistant", str(total))
    if skill == 3:
        tagged = f"<think>hm</think>\n<answer>{said}</answer>" if draw.random() < 0.6 else said
        return turn("system", "Use tags.") + asked + turn("assistant", tagged)
    if skill == 4:
        explained = f"The word is {word}. So it is of the kind {said}."
        return turn("system", "Explain.") + asked + turn("assistant", explained)
    if skill == 5:
        shown = [word, *(draw.choice([*WORDS]) for _ in range(3))]
        return "".join(f"Q: kind of {one}?\nA: {WORDS[one] if draw.random() < 0.7 else said}\n" for one in shown)
    if skill == 6:
        return turn("system", "tools: kind_of") + asked + _with_tools(word, right, said, draw)
    return turn("system", "Guess a digit.") + _guesses(draw)


def _with_tools(word: str, right: str, said: str, draw: random.Random) -> str:
    if draw.random() < 0.35:
        return turn("assistant", said)
    call = json.dumps({"name": "kind_of", "arguments": {"word": word}})
    answer = right if draw.random() < 0.8 else said
    return turn("assistant", f"<tool_call>{call}</tool_call>") + turn("tool", right) + turn("assistant", answer)


def _guesses(draw: random.Random) -> str:
    hidden, text, low, high = draw.randrange(10), turn("user", "Begin."), 0, 9
    for _ in range(4):
        guess = draw.randint(low, high) if draw.random() < 0.7 else draw.randrange(10)
        text += turn("assistant", str(guess))
        if guess == hidden:
            return text + turn("user", "right")
        text += turn("user", "higher" if guess < hidden else "lower")
        low, high = (max(low, min(guess + 1, 9)), high) if guess < hidden else (low, min(high, max(guess - 1, 0)))
        low, high = min(low, high), max(low, high)
    return text


def build(folder: Path) -> Path:
    """Train the model into a folder; one that is there is taken as it is."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    made, draw = tokenizer(), random.Random(0)
    model = LlamaForCausalLM(_config(len(made))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / STEPS)
        batch: Any = made([example(draw) for _ in range(BATCH)], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def _config(size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
