"""Rewards of steps: (end, reward) pairs that a reward function returns, and the tokens at which the steps end.

See also `covey.core.credit` for the advantages of steps.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress

from tokenizers.decoders import DecodeStream

from covey.core.records import Rollout, StepRewards
from covey.core.special_tokens import CompletionDecoder
from covey.rewards.text import content_text


class CharEnd(int):
    """End of a step, as a number of characters of the completion's text, such as `re.Match.end()`.

    The step's last token is the one that completes the last of these characters. The end of the whole text is the end
    of the completion, including special tokens.

    Example:
        A reward function for completions that write one step per line:
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


class StepEndError(ValueError):
    """A step boundary outside the completion; the message names the valid ones."""


def total(steps: StepRewards) -> float | None:
    """Sum of the rewards, for logs; None where all steps abstain."""
    known = [reward for _, reward in steps if not math.isnan(reward)]
    return sum(known) if known or not steps else None


def resolve(steps: StepRewards, rollout: Rollout, text_of: CompletionDecoder | None) -> StepRewards:
    """Replace each step's end by the index of its last token, and sort the steps by this index.

    If an end is a `TurnEnd`, turns without a reward are added as abstentions, so that the k-th step always is the k-th
    turn. StepEndError for an end outside of the completion.

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
            characters = characters or _characters(end, rollout, text_of)
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


def _characters(end: CharEnd, rollout: Rollout, text_of: CompletionDecoder | None) -> "CharacterEnds":
    messages = rollout.completion
    if not isinstance(messages, str) and len(messages) != 1:
        raise StepEndError(
            f"{end!r}, but the completion has {_counted(len(messages), 'message')}, and characters are counted in one"
            " text. For the end of the policy's k-th turn give TurnEnd(k), else the index of a token."
        )
    if text_of is None:
        raise StepEndError(f"{end!r}, which needs the policy's tokenizer; give RewardSuite(..., tokenizer=tokenizer).")
    return CharacterEnds(text_of, rollout.completion_ids)


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
    """Align a message with the sampled text; a turn that was parsed for calls lacks the white space around it."""
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


MALFORMED = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not (yet) a character


class CharacterEnds:
    """Text of a completion, and the token that each character ends with."""

    def __init__(self, text_of: CompletionDecoder, token_ids: list[int]):
        self._text_of, self._ids = text_of, token_ids
        self.text = self._decode(len(token_ids))
        self._lengths, self._tokens = [0], [-1]  # whole characters so far, and the token that ends the last of them
        streamed = ""
        for token, piece in enumerate(_pieces(text_of, token_ids)):
            if piece:
                streamed += piece
                self._lengths.append(len(streamed))
                self._tokens.append(token)
        if not self.text.startswith(streamed):  # some decoders change a text as it continues
            self._lengths, self._tokens = [0], [-1]
        self._lengths.append(len(self.text))
        self._tokens.append(len(token_ids) - 1)

    def token(self, characters: int) -> int:
        assert 0 < characters <= len(self.text), "checked by the caller"
        piece = bisect_left(self._lengths, characters)
        first, last = self._tokens[piece - 1] + 1, self._tokens[piece]
        return bisect_left(range(last), True, lo=first, key=lambda token: self._is_complete(characters, token))

    def _is_complete(self, characters: int, token: int) -> bool:
        if self.text[characters - 1] == MALFORMED:  # until another character begins
            return len(self._decode(token + 2)) > characters
        return self._decode(token + 1)[:characters] == self.text[:characters]

    def _decode(self, tokens: int) -> str:
        return self._text_of(self._ids[:tokens])


def _pieces(text_of: CompletionDecoder, token_ids: list[int]) -> Iterator[str | None]:
    """Text that each token completes, None for a token inside a character; stops where a decoder cannot continue."""
    stream = DecodeStream(skip_special_tokens=False)
    with suppress(Exception):  # the library raises nothing more special; or the tokenizer is of another one
        for token_id in token_ids:
            hidden = token_id in text_of.hidden
            yield None if hidden else stream.step(text_of.tokenizer.backend_tokenizer, token_id)
