"""Which token a character of a decoded completion ends with.

Characters and tokens need not line up: a token may hold several characters, and a character may be spelled by several
tokens. What tokens spell as bytes is read off their names, as byte-level and byte-fallback tokenizers write them, and
believed only where it gives the very text that the tokenizer decodes. For any other tokenizer prefixes are decoded.
Not here: what the positions are for (`covey.rewards.steps`).
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby
from typing import Any

MALFORMED = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no text."""


class CharacterEnds:
    """The text of some tokens, and the token that each character ends with.

    Args:
        tokenizer: decodes; special tokens are left out of the text.
        token_ids: what was sampled.

    Attributes:
        text: what the tokens decode to.

    Example:
        With one token for each character, "4+4" and an end-of-sequence token: after 2 characters comes the end of
        token 1, after all of them that of token 2; the special token adds none.
    """

    def __init__(self, tokenizer: Any, token_ids: list[int]):
        self._tokenizer, self._ids = tokenizer, token_ids
        self.text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        self._ends = _spelled_ends(tokenizer, token_ids, self.text)

    def token(self, characters: int) -> int:
        """The first token with which so many characters, 1 or more, are complete."""
        assert 0 < characters <= len(self.text), "checked by who asks"
        if self._ends is not None:
            return self._ends[characters - 1]
        return bisect_left(range(len(self._ids) - 1), True, key=lambda token: self._is_complete(characters, token))

    def _is_complete(self, characters: int, token: int) -> bool:
        decoded = self._tokenizer.decode(self._ids[: token + 1], skip_special_tokens=True)
        return bool(decoded[:characters] == self.text[:characters])


def _spelled_ends(tokenizer: Any, token_ids: list[int], text: str) -> list[int] | None:
    """The token that each character of `text` ends with; None where token names do not spell it."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    named = list(enumerate(tokenizer.convert_ids_to_tokens(token_ids)))
    written = [(place, name) for place, name in named if token_ids[place] not in special]
    if not all(isinstance(name, str) for _, name in written):
        return None
    for spell in (_byte_level, _byte_fallback):
        characters = list(spell(written))
        spelled = "".join(character for character, _ in characters)
        blank = int(
            spelled[:1] == " " and spelled[1:] == text
        )  # that some tokenizers put before a text and decode away
        if spelled[blank:] == text:
            return [place for _, place in characters[blank:]]
    return None


def _byte_level(written: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    """GPT-2's notation: each character of a name stands for a byte; a name with any other is what it says.

    Args:
        written: tokens with their places.

    Yields:
        Characters, each with the place of the token that completes it; a malformed stretch of bytes is one.
    """
    places: list[int] = []
    data = bytearray()
    for place, name in written:
        values = [_BYTES.get(character) for character in name]
        data += name.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        places += [place] * (len(data) - len(places))
    start = 0
    while start < len(data):
        try:
            good, bad = data[start:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = data[start : start + error.start].decode(), error.end - error.start
        for character in good:
            start += len(character.encode())
            yield character, places[start - 1]
        if bad:
            start += bad
            yield MALFORMED, places[start - 1]


def _byte_fallback(written: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    """SentencePiece's notation: ▁ is a space, <0xE2> a byte; of bytes in a row that are no text each is malformed.

    Args and what it yields: as for `_byte_level`.
    """
    for is_byte, run in groupby(written, key=lambda one: bool(re.fullmatch("<0x[0-9A-Fa-f]{2}>", one[1]))):
        tokens = list(run)
        if not is_byte:
            yield from ((character, place) for place, name in tokens for character in name.replace("▁", " "))
            continue
        try:
            text, start = bytes(int(name[3:5], 16) for _, name in tokens).decode(), 0
        except UnicodeDecodeError:
            yield from ((MALFORMED, place) for place, _ in tokens)
            continue
        for character in text:
            start += len(character.encode())
            yield character, tokens[start - 1][0]


def _printable_bytes() -> dict[str, int]:
    """Characters that stand for bytes: printable ones for themselves, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _printable_bytes()
