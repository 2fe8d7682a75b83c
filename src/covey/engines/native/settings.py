"""`generation_kwargs` of the built-in engine: texts and tokens that end a completion, and additions to its logits."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.core.findings import CheckError
from covey.runtime.safe_text import without_secrets

_ALIASES = {  # transformers' names for vLLM's
    **{"stop_strings": "stop", "min_new_tokens": "min_tokens"},
    **{"bad_words_ids": "bad_words", "sequence_bias": "logit_bias"},
}
_KNOWN = (
    *("stop", "stop_token_ids", "eos_token_id", "min_tokens", "bad_words", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
)
_BOUNDARY = 4  # first tokens of a decoded window may be parts of a character, or lose a space


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a request beyond the fields of `SamplingParams`."""

    stop: tuple[str, ...] = ()  # texts that end a completion; the token that completes one is its last
    end_ids: frozenset[int] = frozenset()  # tokens that end it
    min_tokens: int = 0  # fewest tokens of a completion: nothing ends it before
    # pairs (token sequence, bias): the bias is added to the logit of the last token where the others precede it
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    presence_penalty: float = 0.0  # subtracted from the logit of each token that is in the completion
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the completion
    no_repeat_ngram_size: int = 0  # sequences of this many tokens occur once in prompt and completion; 0: no limit
    tokenizer: Any = None

    def __post_init__(self) -> None:
        biases = [bias for _, bias in self.biases if bias != -math.inf]  # which forbids a token
        finite = all(map(math.isfinite, (self.presence_penalty, self.frequency_penalty, *biases)))
        if not finite or min(map(operator.index, (self.min_tokens, self.no_repeat_ngram_size))) < 0:
            raise ValueError("penalties and biases are finite numbers, and counts at least 0")
        if not all(isinstance(text, str) and text for text in self.stop) or (self.stop and self.tokenizer is None):
            raise ValueError("stop texts are not empty, and need an engine with a `tokenizer`")
        ids = [*self.end_ids, *(token for sequence, _ in self.biases for token in sequence)]
        vocabulary = math.inf if self.tokenizer is None else len(self.tokenizer)
        if not all(0 <= token < vocabulary for token in ids) or not all(sequence for sequence, _ in self.biases):
            raise ValueError(f"token ids are at least 0 and below {vocabulary}, and sequences not empty")

    @property
    def reshapes(self) -> bool:
        """True if a token's distribution depends on the tokens before it in ways other than by the model."""
        penalised = self.presence_penalty or self.frequency_penalty or self.no_repeat_ngram_size
        return bool(self.biases or self.min_tokens or penalised)

    def length_to_stop(self, before: list[int], new: list[int]) -> int:
        """Number of `new` tokens up to the one that completes a stop text; 0 without one."""
        tokens, longest = before + new, max(len(text.encode()) for text in self.stop)
        for end in range(len(before) + 1, len(tokens) + 1):
            start = max(self.min_tokens, end - longest - _BOUNDARY)
            text = self.tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stop):
                return end - len(before)
        return 0

    def add_to(self, logits: Tensor, sequences: Iterable[tuple[list[int], list[int]]]) -> Tensor:
        """Logits [n, V] with the additions for n sequences, each a prompt and the tokens sampled after it."""
        logits = logits.clone()
        for row, (prompt, completion) in zip(logits, sequences, strict=True):
            if changes := self._changes(prompt + completion, completion):
                row[torch.tensor(list(changes), device=row.device)] += row.new_tensor(list(changes.values()))
        return logits

    def _changes(self, tokens: list[int], completion: list[int]) -> dict[int, float]:
        changes: dict[int, float] = {}
        for sequence, bias in self.biases:
            before = len(sequence) - 1
            if tuple(tokens[len(tokens) - before :]) == sequence[:-1]:
                changes[sequence[-1]] = changes.get(sequence[-1], 0.0) + bias
        if self.presence_penalty or self.frequency_penalty:
            for token, count in Counter(completion).items():
                penalty = self.presence_penalty + count * self.frequency_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        forbidden = self.end_ids if len(completion) < self.min_tokens else frozenset()
        if size := self.no_repeat_ngram_size:
            last, starts = tokens[len(tokens) - size + 1 :], range(len(tokens) - size + 1)
            forbidden |= {tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last}
        return changes | dict.fromkeys(forbidden, -math.inf)


NO_SETTINGS = GenerationSettings()


def read_settings(extra: Mapping[str, Any], tokenizer: Any = None, ends: Iterable[int] = ()) -> GenerationSettings:
    """Settings from `generation_kwargs`, with the engine's end tokens; CheckError for unknown or impossible ones."""
    given = {_ALIASES.get(name, name): value for name, value in extra.items() if value is not None}
    shown = without_secrets(dict(extra))
    if unknown := [name for name in given if name not in _KNOWN]:
        raise CheckError.of(
            "setting-word",
            f"generation_kwargs={shown!r}: the built-in engine has no setting {', '.join(map(repr, unknown))}.",
            f"It knows {', '.join((*_KNOWN, *_ALIASES))}, and the fields temperature, top_k, top_p, min_p,"
            " repetition_penalty, max_completion_length and seed.",
        )
    twice = [f"{name!r} and {own!r}" for name, own in _ALIASES.items() if {name, own} <= set(extra) and own in given]
    if twice:
        evidence = f"generation_kwargs={shown!r} has {twice[0]}, two names of one setting: leave one out."
        raise CheckError.of("settings-contradict", evidence)
    try:
        end_ids = {*_token_ids(given.pop("eos_token_id", ends)), *_token_ids(given.pop("stop_token_ids", ()))}
        biases = given.pop("logit_bias", {})
        pairs = biases.items() if isinstance(biases, Mapping) else biases  # transformers writes JSON as a list
        added = [(_token_ids(sequence), float(bias)) for sequence, bias in pairs]
        added += [(word, -math.inf) for word in _words(given.pop("bad_words", ()), tokenizer)]
        stop = given.pop("stop", ())
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return GenerationSettings(stop, frozenset(end_ids), biases=tuple(added), tokenizer=tokenizer, **given)
    except (TypeError, ValueError) as error:
        raise CheckError.of("setting-format", f"generation_kwargs={shown!r} cannot be read: {error}.") from error


def _token_ids(given: Any) -> tuple[int, ...]:
    return tuple(int(token) for token in ([given] if isinstance(given, int | str) else given))


def _words(given: Any, tokenizer: Any) -> Iterable[tuple[int, ...]]:
    """Token sequences of words, at the beginning of a text and within one; or token sequences as given."""
    for word in [given] if isinstance(given, str) else given:
        for text in (word, f" {word.lstrip()}") if isinstance(word, str) else ():
            yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not isinstance(word, str):
            yield _token_ids(word)
