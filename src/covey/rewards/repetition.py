"""Repetition: a penalty on n-grams of tokens that occur more than once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def repeated_fraction(token_ids: list[int], ngram_size: int) -> float:
    """Share of n-grams that repeat earlier ones: 1 - unique / total; 0 if there are none.

    Example:
        >>> repeated_fraction([1, 2, 1, 2, 1], ngram_size=2)  # 12 21 12 21: two of the four are copies
        0.5
    """
    ngrams = list(zip(*(token_ids[start:] for start in range(ngram_size)), strict=False))
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """See `get_repetition_penalty_reward`; a class so that it can be pickled."""

    ngram_size: int = 3
    max_penalty: float = -1.0

    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self.max_penalty * repeated_fraction(ids, self.ngram_size) or 0.0 for ids in completion_ids]  # no -0.0


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
    return RepetitionPenaltyReward(ngram_size, max_penalty)
