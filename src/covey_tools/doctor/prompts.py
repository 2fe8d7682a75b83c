"""Prompts on their way to the model: the tokenizer, what the chat template shows, and what tokens keep of the text."""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import AutoTokenizer

from covey.core.findings import Finding
from covey.core.transcript import content_text
from covey.rollout.prompts import is_conversational
from covey_tools.doctor.examined import ExaminedRun, quiet

READ = 24  # prompts that are looked at
FEW_TEXTS = 3
REAL_VOCABULARY = 5000  # tokens from which on a model is no toy whose text is noise


def tokenizer_drift(run: ExaminedRun) -> Iterator[Finding]:
    """Prompts are as improbable as noise for a model that is sure of itself."""
    size = run.trainer.model.get_input_embeddings().weight.shape[0]
    small = size < REAL_VOCABULARY
    if run.codec.vision is not None or (small and not _is_trained(run.trainer.model)):
        return
    texts = [text for row in run.taken[:READ] if len(text := prompt_text(row)) > 8][:8]
    if small and len(texts) < FEW_TEXTS:  # it need not know what it has not been trained on
        return
    if not small:
        texts.append("The sun rises in the east. Water boils at one hundred degrees, and the cat sat on the mat.")
    own = loss_of(run, run.tokenizer, texts)
    if own < 0.55 * math.log(size):
        return
    for folder, other in () if small else _other_tokenizers(run):
        if len(other) > size:
            continue
        better = loss_of(run, other, texts)
        if better < 0.6 * own:
            yield Finding(
                "tokenizer-drift",
                "error",
                f"the model finds the text of prompts as improbable as noise: {own:.1f} nats a token, and a blind guess"
                f" among its {size:,} tokens takes {math.log(size):.1f}.",
                f"Save the tokenizer that the model was trained with into its folder; the one in {folder} is.",
                f"With the tokenizer of {folder} the same text takes {better:.1f} nats a token instead of {own:.1f}.",
            )
            return
    noise = loss_of(run, run.tokenizer, texts, shuffled=True)
    entropies = [value for one in run.base.rollouts for value in one.entropies or ()]
    entropy = fmean(entropies or [0.0])
    if own > 0.85 * noise and entropy < 0.6 * math.log(size):
        yield Finding(
            "tokenizer-drift",
            "error" if own > 0.95 * noise or (small and not run.base.spread.any()) else "warning",
            f"the model is sure of itself ({entropy:.1f} nats of entropy a token), yet finds the text of prompts as"
            f" improbable as noise ({own:.1f} nats a token).",
            "Save the tokenizer that the model was trained with into its folder, or pass it as `processing_class`.",
            f"The same tokens in a random order take {noise:.1f} nats: as they are written they are no text to it.",
        )


def _is_trained(model: Any) -> bool:
    """True if some norm or bias no longer holds only ones or only zeros, its values in a new model."""
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    return any(bool((weight != 1).any() and (weight != 0).any()) for weight in norms)


def loss_of(run: ExaminedRun, tokenizer: Any, texts: list[str], shuffled: bool = False) -> float:
    """Mean negative log-probability of the tokens of texts after their first three."""
    pairs = []
    for text in texts:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])[:96]
        ids = [ids[i * 7919 % len(ids)] for i in range(len(ids))] if shuffled and len(ids) % 7919 else ids
        if len(ids) > 4:
            pairs.append((ids[:3], ids[3:]))
    found = run.likelihoods(pairs) if pairs else [0.0]
    return -sum(found) / len(found)


def _other_tokenizers(run: ExaminedRun) -> Iterator[tuple[str, Any]]:
    """Tokenizers on this machine that may be the model's, by folder: where it says that it is from, then caches."""
    config, own = run.trainer.model.config, str(getattr(run.tokenizer, "name_or_path", ""))
    sources = [getattr(config, "_name_or_path", ""), run.tokenizer.init_kwargs.get("name_or_path", "")]
    home = Path.home() / ".cache"
    cached = [*(home / "covey").glob("*"), *(home / "huggingface" / "hub").glob("models--*/snapshots/*")]
    for folder in dict.fromkeys(map(str, [*filter(None, sources), *cached])):
        if folder != own and any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            try:
                with quiet():
                    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except Exception:  # another program's files raise anything
                continue
            yield folder, tokenizer


def round_trip(run: ExaminedRun) -> Iterator[Finding]:
    """Text that does not come back from a prompt's tokens, and control tokens that became text."""
    rows = [row for row in run.taken[:READ] if row.get("prompt") is not None]
    if run.codec.vision is not None or not rows:
        return
    shares = [_lost(run.codec, row) for row in rows]
    lost, dropped = [share for share in shares if share > 0], [share for share in shares if share > 0.9]
    if len(lost) > len(rows) / 4:
        example = rows[shares.index(max(shares))]
        shown = run.tokenizer.decode(run.codec.read_row(example).ids)
        evidence = (
            f"{len(lost)} of {len(rows)} prompts lose characters, {sum(lost) / len(lost):.0%} of them on average:"
            f" {prompt_text(example)[-60:]!r} is read by the model as {shown[-90:]!r}."
        )
        code = "template" if len(dropped) > len(rows) / 2 else "prompt-round-trip"
        yield Finding(code, "error", evidence, *_repair(run, rows, len(lost)))
    yield from _cut_by_the_data(rows)
    yield from _controls(run, rows)


def prompt_text(row: dict[str, Any]) -> str:
    prompt: Any = row.get("prompt")
    if is_conversational(prompt):
        return content_text(prompt[-1].get("content"))
    return str(prompt or "")


def _lost(codec: Any, row: dict[str, Any]) -> float:
    """Share of the text of users and systems that is not among the prompt's tokens."""
    prompt = row["prompt"]
    try:
        shown = _dense(codec.tokenizer.decode(codec.read_row(row).ids))
    except ValueError:
        return 0.0
    messages = prompt if is_conversational(prompt) else [{"role": "user", "content": prompt}]
    texts = [_dense(content_text(one.get("content"))) for one in messages if one["role"] != "assistant"]
    if is_conversational(prompt) and messages[-1]["role"] != "assistant":
        hidden = any(name in prompt_text(row) for name in codec.controls.texts)
        texts.append("" if hidden else _dense(rendered(codec, row, messages)))
    missing = sum(len(text) - _longest_shared(text, shown) for text in texts if text not in shown)
    return missing / max(sum(map(len, texts)), 1)


def rendered(codec: Any, row: dict[str, Any], messages: Any, generation: bool = True) -> str:
    """A conversation as the chat template writes it for a row; "" where it fails."""
    kwargs = {**codec.template_kwargs(row.get("chat_template_kwargs")), "tokenize": False}
    kwargs |= {"add_generation_prompt": generation, **({"tools": list(codec.tools)} if codec.tools else {})}
    for name in ("truncation", "max_length", "padding"):
        kwargs.pop(name, None)
    try:
        return str(codec.tokenizer.apply_chat_template(messages, **kwargs))
    except Exception:  # templates are programs of their authors
        return ""


def _dense(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _longest_shared(text: str, shown: str) -> int:
    """Characters of a text that come in the same order in what is shown, in pieces of a few."""
    blocks = SequenceMatcher(None, text, shown, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= min(4, 1 + len(text) // 4))


def _repair(run: ExaminedRun, rows: list[dict[str, Any]], lost: int) -> tuple[str, str]:
    """A change with which fewer prompts lose characters, and its proof."""
    changes: list[tuple[str, Any]] = []
    if run.codec.chat_template_kwargs:
        plain = replace(run.codec, chat_template_kwargs=None)
        changes.append((f"Remove chat_template_kwargs={run.codec.chat_template_kwargs}.", plain))
    backend = getattr(run.tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.normalizer is not None:
        without = copy.deepcopy(run.codec)
        without.tokenizer.backend_tokenizer.normalizer = type(backend)(backend.model).normalizer
        changes.append(("Remove the normalizer from the tokenizer, which changes the text.", without))
    if is_conversational(rows[0]["prompt"]):
        simple = replace(run.codec, chat_template_kwargs=None, tokenizer=copy.deepcopy(run.tokenizer))
        simple.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        changes.append(("Correct the tokenizer's chat_template, which leaves out text of the messages.", simple))
    for fix, codec in changes:
        still = sum(_lost(codec, row) > 0 for row in rows)
        if still < lost / 2:
            return fix, f"So changed, {still} of {len(rows)} prompts lose characters instead of {lost}."
    return (
        "Use the tokenizer that the model was trained with, or remove characters that it does not know from the data.",
        f"Encoded and decoded again, {len(rows) - lost} of {len(rows)} prompts are what they were.",
    )


def _cut_by_the_data(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Prompts of exactly one length that end within a sentence were cut where the data were made."""
    texts = [prompt_text(row) for row in rows]
    longest = max(map(len, texts))
    cut = [text for text in texts if len(text) == longest]
    open_ended = all(re.search(r"[\w,]$", text) for text in cut)
    if longest >= 16 and open_ended and len(set(cut)) > 3 and 0.4 * len(texts) <= len(cut) < len(texts):
        yield Finding(
            "prompt-round-trip",
            "warning",
            f"{len(cut)} of {len(texts)} prompts are of exactly {longest} characters, none longer, and end within a"
            f" sentence: {cut[0][-40:]!r}.",
            "Do not cut prompts where the dataset is made: remove rows that are too long.",
        )


def _controls(run: ExaminedRun, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Control tokens in messages, which are shown to the model as the text of their names."""
    if run.codec.allow_control_tokens or not is_conversational(rows[0]["prompt"]):
        return
    names = [name for name in run.codec.controls.texts if len(name) > 2]
    marked = [row for row in rows if any(name in prompt_text(row) for name in names)]
    if len(marked) < len(rows) / 4:
        return
    allowed, few = replace(run.codec, allow_control_tokens=True), marked[:8]
    as_text, as_tokens = (sum(len(codec.read_row(row).ids) for row in few) for codec in (run.codec, allowed))
    yield Finding(
        "prompt-round-trip",
        "error" if len(marked) > len(rows) / 2 else "warning",
        f"{len(marked)} of {len(rows)} prompts hold control tokens of the model within their messages"
        f" ({next(name for name in names if name in prompt_text(marked[0]))!r}), which it reads as text.",
        "Give the messages without control tokens and let the chat template write these; or, if data may write them,"
        " set allow_control_tokens=True.",
        f"With allow_control_tokens=True the prompts of {len(few)} rows take {as_tokens} tokens instead of {as_text}.",
    )
