"""Rewards of steps: (end, reward) pairs that a reward function returns for a completion, and the tokens they end with.

See also `covey.core.credit` for the advantages of steps.
"""

import math
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, SupportsIndex

import torch

from covey.core.records import Rollout, StepRewards
from covey.rewards.text import content_text


class CharEnd(int):
    """End of a step, as a number of characters of the completion's text, such as `re.Match.end()`.

    The step's last token is the one that completes the last of these characters; the end of the whole text is the end
    of the completion, special tokens included.

    Example:
        A reward function for completions that write a step a line:
        >>> import re
        >>> def lines(completions, **kwargs):
        ...     return [[(CharEnd(m.end()), float("=" in m[0])) for m in re.finditer(".+", c)] for c in completions]
        >>> lines(["1+1=2\\nso"])
        [[(CharEnd(5), 1.0), (CharEnd(8), 0.0)]]
    """

    def __repr__(self) -> str:
        return f"CharEnd({int(self)})"


class TurnEnd(int):
    """End of a step: the end of the policy's k-th turn, from 0. Turns without a reward abstain."""

    def __repr__(self) -> str:
        return f"TurnEnd({int(self)})"


STEPS = "or, for rewards of its steps, a list of (end, reward) pairs"  # alternative to a number, for messages


class StepEndError(ValueError):
    """A step boundary outside the completion; the message names the valid ones."""


def as_steps(pairs: "list | tuple", number: Callable[[Any], Any]) -> StepRewards | None:
    """Validate `(end, reward)` pairs and round their rewards to float32; None if they are no such pairs."""
    steps: StepRewards = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return None
        end, reward = _as_end(pair[0]), number(pair[1])
        if end is None or not (reward is None or isinstance(reward, float)):
            return None
        # Rounded as the matrix of rewards is, so that rewards compare equal in numbers and in pairs.
        steps.append((end, math.nan if reward is None else torch.tensor(reward, dtype=torch.float32).item()))
    return steps


def total(steps: StepRewards) -> float | None:
    """Sum of the rewards, for logs; None where all steps abstain."""
    known = [reward for _, reward in steps if not math.isnan(reward)]
    return sum(known) if known or not steps else None


def resolve(steps: StepRewards, rollout: Rollout, tokenizer: Any) -> StepRewards:
    """Replace each step's end by the index of its last token, and sort the steps by it.

    Where an end is a `TurnEnd`, turns without a reward abstain, so that the k-th step is the k-th turn everywhere.

    Example:
        >>> from covey.core.records import FinishReason
        >>> three = Rollout([1], [2, 3, 4], [True] * 3, None, "abc", FinishReason.STOP, turn_ends=[0, 2])
        >>> resolve([(TurnEnd(1), 1.0)], three, None)
        [(0, nan), (2, 1.0)]
    """
    if not rollout.completion_ids:
        return []
    length = len(rollout.completion_ids)
    turns = rollout.turn_ends or [length - 1]
    characters: CharacterEnds | None = None
    resolved: StepRewards = []
    for end, reward in steps:
        if isinstance(end, TurnEnd):
            if not 0 <= end < len(turns):
                count = _counted(len(turns), "turn")
                raise StepEndError(f"{end!r}, but the completion has {count} of the policy: turns count from 0.")
            token = turns[end]
        elif isinstance(end, CharEnd):
            characters = characters or _characters(end, rollout, tokenizer)
            token = _of_character(end, rollout, characters)
        elif 0 <= end < length:
            token = end
        else:
            raise StepEndError(
                f"token {end}, but the completion has {_counted(length, 'token')}: a plain int is the index of the"
                f" step's last token, from 0 to {length - 1}. For a position in the text, such as the end of a match,"
                " give CharEnd(match.end())."
            )
        resolved.append((token, reward))
    if rewarded := {int(end) for end, _ in steps if isinstance(end, TurnEnd)}:
        resolved += [(token, math.nan) for turn, token in enumerate(turns) if turn not in rewarded]
    return sorted(resolved, key=lambda step: step[0])


def _as_end(end: Any) -> int | None:
    if isinstance(end, CharEnd | TurnEnd):
        return end
    if isinstance(end, bool) or not isinstance(end, SupportsIndex):
        return None
    try:
        return operator.index(end)  # numpy's and torch's integers too
    except (TypeError, ValueError):
        return None


def _characters(end: CharEnd, rollout: Rollout, tokenizer: Any) -> "CharacterEnds":
    messages = rollout.completion
    if not isinstance(messages, str) and len(messages) != 1:
        raise StepEndError(
            f"{end!r}, but the completion has {_counted(len(messages), 'message')}, and characters are counted in one"
            " text. For the end of the policy's k-th turn give TurnEnd(k), else the index of a token."
        )
    if tokenizer is None:
        raise StepEndError(f"{end!r}, which needs the policy's tokenizer; give RewardSuite(..., tokenizer=tokenizer).")
    return CharacterEnds(tokenizer, rollout.completion_ids)


def _of_character(end: CharEnd, rollout: Rollout, characters: "CharacterEnds") -> int:
    text = rollout.completion
    seen = text if isinstance(text, str) else content_text(text[0].get("content"))
    offset, whole = _align(seen, characters.text)
    if offset is None:
        raise StepEndError(
            f"{end!r}, but the completion's text is not what its tokens decode to, so its characters belong to no"
            " tokens: give indexes of tokens instead."
        )
    if whole and end == len(seen):
        return len(rollout.completion_ids) - 1
    if not 0 < end <= len(seen):
        raise StepEndError(
            f"{end!r}, but the completion's text has {_counted(len(seen), 'character')}: give how many of them precede"
            " the end, 1 or more, as match.end() does."
        )
    if end <= offset:
        raise StepEndError(
            f"{end!r}, but the first {_counted(offset, 'character')} of the text were the prompt's, which the policy"
            " only continued: leave steps out that end there."
        )
    return characters.token(end - offset)


def _align(seen: str, sampled: str) -> tuple[int | None, bool]:
    """Align a message with the sampled text. A turn that was parsed for calls has no white space around it."""
    bare, blank = sampled.strip(), len(sampled) - len(sampled.lstrip())
    if seen.endswith(sampled):
        return len(seen) - len(sampled), True
    if bare and seen.endswith(bare):
        return len(seen) - len(bare) - blank, True
    if sampled.startswith(seen):
        return 0, False
    return (-blank if sampled.lstrip().startswith(seen) else None), False


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")


# Characters and tokens need not align. The bytes of tokens are read from their names, as byte-level and byte-fallback
# tokenizers write them, and used only if they give the text that the tokenizer decodes; else prefixes are decoded.
MALFORMED = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no text


class CharacterEnds:
    """Text of a completion, and the token that each character ends with; special tokens are left out of the text."""

    def __init__(self, tokenizer: Any, token_ids: list[int]):
        self._tokenizer, self._ids = tokenizer, token_ids
        self.text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        self._ends = _spelled_ends(tokenizer, token_ids, self.text)

    def token(self, characters: int) -> int:
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
    """Characters in GPT-2's notation: each character of a name is a byte; a name with other characters is text."""
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
    """Characters in SentencePiece's notation: ▁ is a space, <0xE2> a byte; malformed bytes are one character each."""
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


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""Characters that encode bytes: printable ones encode themselves, the others follow from U+0100 on."""
