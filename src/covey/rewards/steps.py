"""Rewards of steps: what a reward function returns for parts of a completion, and which tokens the parts end with.

Instead of a number a function may return, for a completion, a list of `(end, reward)` pairs. `as_steps` checks such a
list when the function returns; `resolve` finds the tokens once the completions are at hand. Not here: how steps become
advantages (`covey.core.credit`), and what a number among them means (`covey.algorithms.credit`).
"""

import math
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from covey.core.credit import StepRewards
from covey.core.rollout import Rollout
from covey.rewards.char_offsets import CharacterEnds
from covey.rewards.text import content_text


class CharEnd(int):
    """The end of a step, by how many characters of the completion's text precede it.

    That is what `re.Match.end()` gives, or `len` of the text so far. The step's last token is the one that completes
    the last of these characters; the end of the whole text is the end of the completion, special tokens included.

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
    """The end of a step: that of the policy's k-th turn, from 0. Turns for which there is no reward abstain."""

    def __repr__(self) -> str:
        return f"TurnEnd({int(self)})"


STEPS = "or, for rewards of its steps, a list of (end, reward) pairs"
"""What else a reward function may return for a completion."""


class NoSuchEnd(ValueError):
    """An end that is none of its completion; says what there is."""


def is_steps(item: Any) -> bool:
    """Whether something that a reward function returned for a completion is meant as rewards of steps."""
    return isinstance(item, list | tuple)


def as_steps(pairs: "list | tuple", number: Callable[[Any], Any]) -> StepRewards | None:
    """`(end, reward)` pairs with their ends as they are and their rewards as float32 numbers; None if they are no such.

    Args:
        pairs: what was returned.
        number: reads a reward: a float or None; anything else is none.
    """
    steps: StepRewards = []
    for pair in pairs:
        if not is_steps(pair) or len(pair) != 2:
            return None
        end, reward = _as_end(pair[0]), number(pair[1])
        if end is None or not (reward is None or isinstance(reward, float)):
            return None
        steps.append((end, math.nan if reward is None else _as_float32(reward)))
    return steps


def total(steps: StepRewards) -> float | None:
    """The sum of the rewards, which is what logs show; None where all steps abstain.

    Example:
        >>> total([(3, 1.0), (7, 0.5), (9, math.nan)]), total([(3, math.nan)]), total([])
        (1.5, None, 0.0)
    """
    known = [reward for _, reward in steps if not math.isnan(reward)]
    return sum(known) if known or not steps else None


def resolve(steps: StepRewards, rollout: Rollout, tokenizer: Any) -> StepRewards:
    """The same steps with the index of each one's last token, in the order of tokens.

    A completion without tokens has nothing to credit, and no steps. Where an end is a `TurnEnd`, turns without a reward
    abstain, so that the k-th step is the k-th turn in every completion.

    Args:
        steps: as a reward function returned them.
        rollout: what they are rewards of.
        tokenizer: of the policy; needed for `CharEnd` alone.

    Raises:
        NoSuchEnd: an end that is none of this completion.

    Example:
        >>> from covey.core.rollout import FinishReason
        >>> three = Rollout([1], [2, 3, 4], [True] * 3, None, "abc", FinishReason.STOP, turn_ends=[0, 2])
        >>> resolve([(TurnEnd(1), 1.0)], three, None)
        [(0, nan), (2, 1.0)]
    """
    if not rollout.completion_ids:
        return []
    turns = rollout.turn_ends or [len(rollout.completion_ids) - 1]
    characters: CharacterEnds | None = None
    resolved: StepRewards = []
    for end, reward in steps:
        if isinstance(end, TurnEnd):
            token = _of_turn(end, turns)
        elif isinstance(end, CharEnd):
            characters = characters or _characters(end, rollout, tokenizer)
            token = _of_character(end, rollout, characters)
        else:
            token = _of_token(end, len(rollout.completion_ids))
        resolved.append((token, reward))
    if any(isinstance(end, TurnEnd) for end, _ in steps):
        rewarded = {int(end) for end, _ in steps if isinstance(end, TurnEnd)}
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


def _as_float32(reward: float) -> float:
    """As the matrix of rewards has it: equal rewards are equal, whether they came as numbers or in pairs."""
    return torch.tensor(reward, dtype=torch.float32).item()


def _of_turn(end: TurnEnd, turns: list[int]) -> int:
    if not 0 <= end < len(turns):
        raise NoSuchEnd(
            f"{end!r}, but the completion has {_counted(len(turns), 'turn')} of the policy: turns count from 0."
        )
    return turns[end]


def _of_token(end: int, length: int) -> int:
    if not 0 <= end < length:
        raise NoSuchEnd(
            f"token {end}, but the completion has {_counted(length, 'token')}: a plain int is the index of the step's"
            f" last token, from 0 to {length - 1}. For a position in the text, such as the end of a match, give"
            " CharEnd(match.end())."
        )
    return end


def _characters(end: CharEnd, rollout: Rollout, tokenizer: Any) -> CharacterEnds:
    messages = rollout.completion
    if not isinstance(messages, str) and len(messages) != 1:
        raise NoSuchEnd(
            f"{end!r}, but the completion has {_counted(len(messages), 'message')}, and characters are counted in one"
            " text. For the end of the policy's k-th turn give TurnEnd(k), else the index of a token."
        )
    if tokenizer is None:
        raise NoSuchEnd(f"{end!r}, which needs the policy's tokenizer; give RewardSuite(..., tokenizer=tokenizer).")
    return CharacterEnds(tokenizer, rollout.completion_ids)


def _of_character(end: CharEnd, rollout: Rollout, characters: CharacterEnds) -> int:
    text = rollout.completion
    seen = text if isinstance(text, str) else content_text(text[0].get("content"))
    begun, whole = _begun(seen, characters.text)
    if begun is None:
        raise NoSuchEnd(
            f"{end!r}, but the completion's text is not what its tokens decode to, so its characters belong to no"
            " tokens: give indexes of tokens instead."
        )
    if whole and end == len(seen):
        return len(rollout.completion_ids) - 1
    if not 0 < end <= len(seen):
        raise NoSuchEnd(
            f"{end!r}, but the completion's text has {_counted(len(seen), 'character')}: give how many of them precede"
            " the end, 1 or more, as match.end() does."
        )
    if end <= begun:
        raise NoSuchEnd(
            f"{end!r}, but the first {_counted(begun, 'character')} of the text were the prompt's, which the policy"
            " only continued: leave steps out that end there."
        )
    return characters.token(end - begun)


def _begun(seen: str, sampled: str) -> tuple[int | None, bool]:
    """How a message lies on the sampled text. A turn that was read for calls is one without white space around it.

    Returns:
        The characters of the message before the sampled ones, negative where it lacks the first of these, None if it is
        another text; and whether it holds all to the end, not only what precedes a call.
    """
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
