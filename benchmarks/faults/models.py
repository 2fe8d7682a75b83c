"""Folders of SmolLM2-135M-Instruct with something wrong: the weights are links, the other files are changed.

To add one, write a function that changes the files of a folder and put it into `VARIANTS`.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_GENERATION_PROMPT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '[INST] <<SYS>>\n' + message['content'] +"
    " '\n<</SYS>>\n\n' }}{% elif message['role'] == 'user' %}{{ ('' if loop.index0 == 1 else '[INST] ') +"
    " message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' </s>' }}{% endif %}{% endfor %}"
)


def build(source: Path, folder: Path, variant: str) -> Path:
    """A copy of the model's folder with a variant's files."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)
    VARIANTS[variant](folder)
    return folder


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edited(folder / "tokenizer.json", change)


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)  # type: ignore[return-value]


def other_end(folder: Path) -> None:
    """The end of a text, which the model never writes in a chat, in place of the end of a turn."""
    for name in ("config.json", "generation_config.json"):
        edited(folder / name, lambda content: content.update(eos_token_id=0, pad_token_id=0))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    edited(folder / "tokenizer_config.json", lambda content: content.update(names))


def normalised(*normalizers: dict[str, Any]) -> Callable[[Path], None]:
    joined = {"type": "Sequence", "normalizers": list(normalizers)}
    return tokenizer(lambda content: content.update(normalizer=joined))


def _without_operators(content: dict[str, Any]) -> None:
    """A pruned vocabulary: no plus and no minus, and pieces that nothing encodes to are dropped silently."""
    model = content["model"]
    pruned = {piece for piece in model["vocab"] if "+" in piece or "-" in piece}
    model["vocab"] = {f"<pruned {i}>" if piece in pruned else piece: i for piece, i in model["vocab"].items()}
    model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & pruned]


def _few_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][:300]


def _other_vocabulary(content: dict[str, Any]) -> None:
    """The same pieces under other ids: the tokenizer of another checkpoint."""
    vocabulary, special = content["model"]["vocab"], {token["content"] for token in content["added_tokens"]}
    pieces = [piece for piece in vocabulary if piece not in special]
    ids = [vocabulary[piece] for piece in pieces]
    random.Random(0).shuffle(ids)
    vocabulary.update(zip(pieces, ids, strict=True))


def _dropout(content: dict[str, Any]) -> None:
    """Merges skipped at random, as some tokenizers are trained: a text has other tokens each time."""
    content["model"]["dropout"] = 0.5


VARIANTS: dict[str, Callable[[Path], None]] = {
    "other end": other_end,
    "no generation prompt": template(NO_GENERATION_PROMPT),
    "llama 2 template": template(LLAMA_2),
    "lower case": normalised({"type": "Lowercase"}),
    "digits as 0": normalised({"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": "0"}),
    "pruned vocabulary": tokenizer(_without_operators),
    "few merges": tokenizer(_few_merges),
    "other vocabulary": tokenizer(_other_vocabulary),
    "merges at random": tokenizer(_dropout),
}
