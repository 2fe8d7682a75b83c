"""Mathematical correctness: rewards that compare with a `solution` column through math-verify.

Needs the `math` extra. Expressions are parsed and compared in a child process (`math_worker.py`), so these functions
work on any thread and cannot hang. For plain numbers and strings see `covey.rewards.matching`, which needs no extra.
"""

import math
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from covey.rewards.contract import answers, per_completion
from covey.rewards.text import completion_text
from covey.runtime.child_process import Quota
from covey.runtime.isolation import FunctionWorker, WorkerFailed

CHECK_SECONDS = 5.0  # deadline for parsing and comparing one pair
RECENT_CHECKS, MAX_FAILED_CHECKS = 64, 8  # after so many failures the deadline is 1 s, to spare that of the call


@dataclass(frozen=True)
class AnswerComparison:
    """Comparison of an answer with its reference, and both as they were parsed."""

    reward: float | None  # 1 or 0; None if the reference could not be parsed; NaN if the check took too long or failed
    gold: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)


@cache
def _worker() -> FunctionWorker:
    return FunctionWorker(("check", Path(__file__).with_name("math_worker.py")), Quota(6.0, 8), subprocess.DEVNULL)


_failures: deque[bool] = deque(maxlen=RECENT_CHECKS)


def verify_answers(answers: list[str], solutions: list[str], seconds: float = CHECK_SECONDS) -> list[AnswerComparison]:
    """Compare each answer with its reference; results are cached, except failures."""
    pairs = list(zip(answers, map(str, solutions), strict=True))
    found: dict[tuple[str, str], AnswerComparison] = {}  # a pair that failed is not checked again in this call
    for pair in dict.fromkeys(pairs):
        try:
            found[pair] = _compared(*pair, seconds)
        except WorkerFailed:
            _failures.append(True)
            found[pair] = AnswerComparison(math.nan)
    return [found[pair] for pair in pairs]


@lru_cache(maxsize=4096)
def _compared(answer: str, solution: str, seconds: float) -> AnswerComparison:
    """Compare one pair in the worker. Failures are not cached, since the machine may have been busy."""
    may_be_slow = _failures.count(True) < MAX_FAILED_CHECKS
    _worker().start()  # its imports may take longer than a comparison
    reply = _worker().call({"gold": solution, "answer": answer}, seconds if may_be_slow else min(seconds, 1.0))
    if "raised" in reply:  # MemoryError, RecursionError, or an error of sympy's
        raise WorkerFailed(reply["raised"][1])
    _failures.append(False)
    return AnswerComparison(**reply["result"])


@per_completion
@answers("answer_parsed")
def accuracy_reward(
    completions: list[Any], solution: list[str], log_extra: Callable[[str, list], None] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 if the final answer is mathematically equal to `solution`, else 0; None if `solution` cannot be parsed.

    The answer is the content of `\\boxed{}` (several boxes are one set), else LaTeX announced as the answer. An
    answer that cannot be checked within five seconds gets NaN: it has no reward, and is counted under
    `rewards/accuracy_reward/failures`.

    Args:
        completions: strings or messages.
        solution: the dataset's column of references.
        log_extra: given by the trainer; adds `solution`, `gold_parsed` and `answer_parsed` to the completions table.

    Example:
        >>> accuracy_reward([r"So it is \\boxed{\\frac{2}{4}}.", r"\\boxed{3}"], solution=["1/2", "$2$"])
        [1.0, 0.0]
    """
    return _accuracy([completion_text(completion) for completion in completions], solution, log_extra)


@per_completion
@answers("answer_parsed")
def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` on the text after the reasoning; 0 where the reasoning never ends.

    Args:
        completions: strings or messages.
        solution: the dataset's column of references.
        reasoning_delimiters: texts that end the reasoning, `["</think>"]` by default. The first of them that occurs is
            used, and the answer starts after its last occurrence.
        log_extra: as in `accuracy_reward`.

    Example:
        >>> texts = [r"<think>Half of 8.</think> \\boxed{4}", r"<think> \\boxed{4}"]
        >>> reasoning_accuracy_reward(texts, solution=["4", "4"])
        [1.0, 0.0]
    """
    texts = [completion_text(completion) for completion in completions]
    delimiters = reasoning_delimiters or ["</think>"]
    finals = [next((text.rpartition(mark)[2] for mark in delimiters if mark in text), None) for text in texts]
    rewards = _accuracy([final or "" for final in finals], solution, log_extra)
    return [0.0 if final is None else reward for final, reward in zip(finals, rewards, strict=True)]


def _accuracy(texts: list[str], gold: list[str], log_extra: Callable[[str, list], None] | None) -> list[float | None]:
    comparisons = verify_answers(texts, gold)
    if log_extra is not None:
        log_extra("solution", list(gold))
        log_extra("gold_parsed", [", ".join(comparison.gold) for comparison in comparisons])
        log_extra("answer_parsed", [", ".join(comparison.answer) for comparison in comparisons])
    return [comparison.reward for comparison in comparisons]
