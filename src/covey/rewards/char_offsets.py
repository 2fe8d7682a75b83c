"""Tokens that the characters of a decoded completion end with.

Characters and tokens need not align: a token may hold several characters, and a character may consist of several
tokens. The bytes of tokens are read from their names, as byte-level and byte-fallback tokenizers write them, and used
only if they give the text that the tokenizer decodes. For other tokenizers prefixes are decoded.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby
from typing import Any

MALFORMED = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no text."""


class CharacterEnds:
    """Text of a completion, and the token that each character ends with.

    Args:
        tokenizer: decodes; special tokens are left out of the text.
        token_ids: of the completion.

    Attributes:
        text: the decoded tokens.

    Example:
        With one token for each character, "4+4" and an end-of-sequence token: after 2 characters comes the end of
        token 1, after all of them that of token 2; the special token adds none.
    """

    def __init__(self, tokenizer: Any, token_ids: list[int]):
        self._tokenizer, self._ids = tokenizer, token_ids
        self.text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        self._ends = _spelled_ends(tokenizer, token_ids, self.text)

    def token(self, characters: int) -> int:
        """Index of the token that completes the first `characters` characters, 1 or more."""
        assert 0 < characters <= len(self.text), "checked by the caller"
        if self._ends is not None:
            return self._ends[characters - 1]
        return bisect_left(range(len(self._ids) - 1), True, key=lambda token: self._is_complete(characters, token))

    def _is_complete(self, characters: int, token: int) -> bool:
        decoded = self._tokenizer.decode(self._ids[: token + 1], skip_special_tokens=True)
        return bool(decoded[:characters] == self.text[:characters])


def _spelled_ends(tokenizer: Any, token_ids: list[int], text: str) -> list[int] | None:
    """Token that each character of `text` ends with; None if token names do not spell the text."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    named = list(enumerate(tokenizer.convert_ids_to_tokens(token_ids)))
    written = [(index, name) for index, name in named if token_ids[index] not in special]
    if not all(isinstance(name, str) for _, name in written):
        return None
    for spell in (_byte_level, _byte_fallback):
        characters = list(spell(written))
        spelled = "".join(character for character, _ in characters)
        blank = int(spelled[:1] == " " and spelled[1:] == text)  # some tokenizers add a space and remove it again
        if spelled[blank:] == text:
            return [index for _, index in characters[blank:]]
    return None


def _byte_level(written: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    """Characters in GPT-2's notation: each character of a name is a byte; a name with other characters is text.

    Args:
        written: indices and names of tokens.

    Yields:
        Characters, each with the index of the token that completes it; malformed bytes in a row are one.
    """
    indices: list[int] = []
    data = bytearray()
    for index, name in written:
        values = [_BYTES.get(character) for character in name]
        data += name.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        indices += [index] * (len(data) - len(indices))
    start = 0
    while start < len(data):
        try:
            good, bad = data[start:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = data[start : start + error.start].decode(), error.end - error.start
        for character in good:
            start += len(character.encode())
            yield character, indices[start - 1]
        if bad:
            start += bad
            yield MALFORMED, indices[start - 1]


def _byte_fallback(written: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    """Characters in SentencePiece's notation: ▁ is a space, <0xE2> a byte; malformed bytes are one character each.

    Arguments and results are those of `_byte_level`.
    """
    for is_byte, run in groupby(written, key=lambda one: bool(re.fullmatch("<0x[0-9A-Fa-f]{2}>", one[1]))):
        tokens = list(run)
        if not is_byte:
            yield from ((character, index) for index, name in tokens for character in name.replace("▁", " "))
            continue
        try:
            text, start = bytes(int(name[3:5], 16) for _, name in tokens).decode(), 0
        except UnicodeDecodeError:
            yield from ((MALFORMED, index) for index, _ in tokens)
            continue
        for character in text:
            start += len(character.encode())
            yield character, tokens[start - 1][0]


def _printable_bytes() -> dict[str, int]:
    """Characters that encode bytes: printable ones encode themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _printable_bytes()
