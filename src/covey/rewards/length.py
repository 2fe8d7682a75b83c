"""Rewards for length and repetition, which depend on the tokens of a completion, alone or with correctness."""

import math
from collections.abc import Callable
from typing import Any

from covey.rewards.accuracy import verify_answers
from covey.rewards.contract import per_completion, with_settings
from covey.rewards.text import completion_text


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """0 up to max - cache tokens, then linearly down to -1 at max, -1 beyond (DAPO, arXiv 2503.14476, equation 13).

    Example:
        >>> [soft_overlong_punishment(length, 100, 20) for length in (80, 90, 100, 101)]
        [0.0, -0.5, -1.0, -1.0]
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    if length <= max_completion_len:
        return (free - length) / soft_punish_cache
    return -1.0


def _soft_overlong(limit: int, cache: int, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [soft_overlong_punishment(len(ids), limit, cache) for ids in completion_ids]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make a reward that discourages completions close to the limit (DAPO, arXiv 2503.14476, section 3.4).

    Args:
        max_completion_len: tokens; longer completions get -1.
        soft_punish_cache: width, in tokens, of the range below it in which the penalty grows from 0 to -1.

    Raises:
        ValueError: the width is negative or larger than the limit.

    Example:
        >>> get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=[[7] * 90])
        [-0.5]
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must lie between 0 and max_completion_len={max_completion_len}."
        )
    return with_settings(_soft_overlong, "soft_overlong_punishment_reward", max_completion_len, soft_punish_cache)


def cosine_scaled(length: int, max_len: int, at_zero: float, at_max: float) -> float:
    """Half a cosine wave from `at_zero` at length 0 to `at_max` at `max_len`, constant beyond (arXiv 2502.03373, §4).

    Example:
        >>> [round(cosine_scaled(length, 100, 1.0, 0.5), 2) for length in (0, 50, 100, 200)]
        [1.0, 0.75, 0.5, 0.5]
    """
    return at_max + (at_zero - at_max) * (1 + math.cos(math.pi * min(length / max_len, 1.0))) / 2


@per_completion
def _cosine_scaled(
    max_len: int,
    of_wrong: tuple[float, float],
    of_correct: tuple[float, float],
    completions: list[Any],
    solution: list[str],
    completion_ids: list[list[int]],
    **kwargs: Any,
) -> list[float | None]:
    """Pairs of rewards: of an empty answer, and of an answer of `max_len` tokens."""
    comparisons = verify_answers([completion_text(completion) for completion in completions], solution)
    return [
        cosine_scaled(len(ids), max_len, *(of_correct if one.reward else of_wrong))
        if one.reward in (0, 1)
        else one.reward
        for one, ids in zip(comparisons, completion_ids, strict=True)
    ]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Make a correctness reward scaled by length: it prefers short right and long wrong answers (arXiv 2502.03373).

    Correctness is judged by `accuracy_reward` (a `solution` column, math-verify); the reward is None if the solution
    cannot be parsed. Length is counted in tokens.

    Args:
        max_len: tokens at which the scale ends.
        min_value_wrong: reward of a wrong answer of length 0.
        max_value_wrong: reward of a wrong answer of `max_len` tokens or more.
        min_value_correct: reward of a right answer of `max_len` tokens or more.
        max_value_correct: reward of a right answer of length 0.

    Raises:
        ValueError: `max_len` is not positive.

    Example:
        >>> reward = get_cosine_scaled_reward(max_len=100)
        >>> values = reward([r"\\boxed{4}"] * 2, ["4", "5"], [[1] * 50, [1] * 100])
        >>> [round(value, 2) for value in values]
        [0.75, -0.5]
    """
    if max_len <= 0:
        raise ValueError(f"max_len={max_len} must be a positive number of tokens.")
    of_wrong, of_correct = (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct)
    return with_settings(_cosine_scaled, "cosine_scaled_reward", max_len, of_wrong, of_correct)


def repeated_fraction(token_ids: list[int], ngram_size: int) -> float:
    """Share of n-grams that repeat earlier ones: 1 - unique / total; 0 if there are none.

    Example:
        >>> repeated_fraction([1, 2, 1, 2, 1], ngram_size=2)  # 12 21 12 21: two of the four are copies
        0.5
    """
    ngrams = list(zip(*(token_ids[start:] for start in range(ngram_size)), strict=False))
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _repetition(ngram_size: int, most: float, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [most * repeated_fraction(ids, ngram_size) or 0.0 for ids in completion_ids]  # no -0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Make a penalty that grows with the share of repeated token n-grams (arXiv 2502.03373, appendix).

    Args:
        ngram_size: tokens per n-gram.
        max_penalty: the reward, at most 0, of a completion whose n-grams are all repeated.

    Raises:
        ValueError: `max_penalty` is positive, or `ngram_size` is below 1.

    Example:
        >>> get_repetition_penalty_reward(ngram_size=2)(completion_ids=[[1, 2, 1, 2, 1], [1, 2, 3]])
        [-0.5, 0.0]
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} would reward repetition; pass 0 or a negative number.")
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size}; an n-gram has at least one token.")
    return with_settings(_repetition, "repetition_penalty_reward", ngram_size, max_penalty)
