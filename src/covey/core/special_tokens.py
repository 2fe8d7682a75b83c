"""Special tokens around and inside of texts: those that a tokenizer adds, and those that are part of a completion."""

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

THINKING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<|think|>": "<|/think|>",
    "[THINK]": "[/THINK]",  # Mistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",  # Kimi
}
"""Marks that open a block of thinking, and those that close it."""

_OPENS = re.compile(rf"(?:{'|'.join(map(re.escape, THINKING))})\s*\Z")
_TAG = re.compile(r"(<\|?|\[)/?([A-Za-z][\w:-]+)(\|?>|\])")
_REASONING = re.compile("think|thought|reason|answer|solution", re.IGNORECASE)
_TAIL = 16  # tokens at the end of a prompt that may open thinking: a mark of several tokens and white space


def added_prefix(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts in front of every text, such as <bos> or [CLS]."""
    whole, bare = (list(tokenizer("a", **kwargs)["input_ids"]) for kwargs in ({}, {"add_special_tokens": False}))
    starts = (at for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare)
    return whole[: next(starts, 0)]


def without_second(ids: list[int], prefix: Sequence[int]) -> list[int]:
    """Token `ids` of a text, with the prefix that the tokenizer adds once if the text already began with it.

    Example:
        >>> without_second([1, 1, 5], [1]), without_second([1, 5], [1])
        ([1, 5], [1, 5])
    """
    size = len(prefix)
    return ids[size:] if size and ids[size : 2 * size] == [*prefix] else ids


def opened_thinking(tokenizer: Any, before: Sequence[int]) -> str:
    """Mark at the end of the tokens before a turn that opens thinking, such as `"<think>\\n"`; else an empty text."""
    if not before:
        return ""
    found = _OPENS.search(tokenizer.decode(list(before[-_TAIL:]), skip_special_tokens=False))
    return found[0] if found else ""


@dataclass(eq=False)
class CompletionDecoder:
    """Decoder of completions to text that leaves out special tokens, except those that are part of an answer.

    Kept are tags with a counterpart (`<think>` and `</think>`, `[THINK]` and `[/THINK]`, `<answer>` and `</answer>`),
    tokens whose text names thinking, reasoning, answers or solutions, and the tokens in `named`. Tokens that begin, end
    or pad sequences are always left out.
    """

    tokenizer: Any
    named: Collection[str] = ()  # texts of further special tokens to keep

    def __post_init__(self) -> None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number: str(token) for number, token in added.items() if token.special}
        sequence = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "cls_token_id", "sep_token_id")
        never = {getattr(self.tokenizer, name, None) for name in sequence}
        texts = set(special.values())
        self.shown = frozenset(n for n, text in special.items() if n not in never and self._is_mark(text, texts))
        self.hidden = frozenset(special) - self.shown
        self._size, self._warned = len(self.tokenizer), False

    def _is_mark(self, text: str, texts: Collection[str]) -> bool:
        tag = _TAG.fullmatch(text)
        paired = tag is not None and {tag[1] + tag[2] + tag[3], f"{tag[1]}/{tag[2]}{tag[3]}"} <= {*texts}
        return paired or text in self.named or _REASONING.search(text) is not None

    def __call__(self, token_ids: Sequence[int]) -> str:
        if not self._warned and max(token_ids, default=0) >= self._size:
            self._warn_of_unknown(token_ids)
        if not self.shown:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return str(self.tokenizer.decode([one for one in token_ids if one not in self.hidden]))

    def _warn_of_unknown(self, token_ids: Sequence[int]) -> None:
        """Warn once that the policy samples ids for which the tokenizer has no token."""
        beyond = [one for one in token_ids if one >= self._size]
        names = self.tokenizer.convert_ids_to_tokens(beyond)  # ids may have gaps
        if unknown := [one for one, name in zip(beyond, names, strict=True) if name is None]:
            self._warned = True
            warnings.warn(
                f"the policy sampled token {unknown[0]}, which is not among the tokenizer's {self._size} tokens: the"
                " model's head is padded. Such tokens have no text, so rewards do not see them, and servers may refuse"
                " them. To remove them, call `model.resize_token_embeddings(len(tokenizer))` before training.",
                stacklevel=2,
            )
