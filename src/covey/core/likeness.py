"""Likeness of completions: equal answers, and the share of distinct answers within groups and across prompts.

Letters: N completions; the G completions of a group are consecutive.
"""

import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from covey.core.records import FinishReason, PromptSample, Rollout
from covey.core.transcript import content_text, is_messages

REFERENCES = ("solution", "answer", "ground_truth", "reference", "label", "target", "expected", "gold")
"""Columns that may hold the right answer of a row; the first one that is present counts."""
AROUND = " \t\r\n.,;:!?\"'`*_()[]{}<>"


def answer_of(completion: Any) -> str:
    """Text of a completion, or of its last assistant message, in lower case, without repeated or enclosing marks.

    Example:
        >>> answer_of("Billing."), answer_of([{"role": "assistant", "content": " **billing** "}])
        ('billing', 'billing')
    """
    if is_messages(completion):
        of_assistant = [message for message in completion if message.get("role") == "assistant"] or completion
        completion = content_text(of_assistant[-1].get("content")) if of_assistant else ""
    return " ".join(str(completion).casefold().split()).strip(AROUND)


def reference_of(row: Mapping[str, Any]) -> str | None:
    """The right answer of a row, as `answer_of` writes it; None where no column names it."""
    name = next((name for name in REFERENCES if isinstance(row.get(name), str | int | float)), None)
    return None if name is None else answer_of(str(row[name]))


def key(text: str) -> int:
    """A number for a text, the same in all processes."""
    return zlib.crc32(text.encode("utf-8", "replace"))


class Keys(NamedTuple):
    """Checksums (`key`) of the texts of a rollout by which it is compared with others."""

    prompt: int
    answer: int | None  # of the last message; None for a rollout that failed or is a placeholder
    reference: int | None  # of the right answer; None where the row has none
    absent: bool = False  # True for a placeholder


def keys_of(sample: PromptSample, rollout: Rollout) -> Keys:
    right = reference_of(sample.row)
    return Keys(
        key(str(rollout.asked(sample.row) or sample.prompt)),
        None if rollout.finish in (FinishReason.ERROR, FinishReason.ABSENT) else key(answer_of(rollout.completion)),
        None if right is None else key(right),
        rollout.absent,
    )


def distinct_in_groups(answers_N: Sequence[Hashable | None], group_size: int) -> list[float]:
    """Share of distinct answers in each group, from 1/G to 1; None is no answer, and groups without any are left out.

    Example:
        >>> distinct_in_groups(["a", "b", "a", "c", "c", None], 3)
        [0.6666666666666666, 0.5]
    """
    groups = [answers_N[start : start + group_size] for start in range(0, len(answers_N), group_size)]
    known = [[answer for answer in group if answer is not None] for group in groups]
    return [len(set(group)) / len(group) for group in known if group]


def distinct_across_prompts(answers_N: Sequence[Hashable | None], prompts_N: Sequence[Hashable]) -> float | None:
    """Number of distinct answers, divided by the number of distinct (prompt, answer) pairs.

    1 if no two prompts share an answer, 1/P if all P prompts have the same one; None for fewer than two prompts.

    Example:
        >>> distinct_across_prompts(["a", "b", "a", "a"], [1, 1, 2, 2])
        0.6666666666666666
    """
    pairs = {(prompt, answer) for prompt, answer in zip(prompts_N, answers_N, strict=True) if answer is not None}
    if len({prompt for prompt, _ in pairs}) < 2:
        return None
    return len({answer for _, answer in pairs}) / len(pairs)


def most_common(answers: Sequence[Hashable | None]) -> tuple[Any, float]:
    """The most frequent answer and its share of all answers; None is no answer. (None, 0.0) without answers.

    Example:
        >>> most_common(["a", "b", "a", None])
        ('a', 0.6666666666666666)
    """
    known = [answer for answer in answers if answer is not None]
    if not known:
        return None, 0.0
    answer, count = Counter(known).most_common(1)[0]
    return answer, count / len(known)


def common_share(answers: Sequence[Hashable | None], prompts: Sequence[Hashable]) -> float:
    """Share of the most frequent answer, averaged over prompts, so that each prompt counts once.

    None is another answer than all others, as of a rollout that failed. Leave absent rollouts out of both lists.

    Example:
        >>> common_share(["a", "a", "a", "b"], [1, 1, 1, 2])
        0.5
    """
    answer, _ = most_common(answers)
    by_prompt: dict[Hashable, list[bool]] = {}
    for prompt, one in zip(prompts, answers, strict=True):
        by_prompt.setdefault(prompt, []).append(one == answer)
    return fmean(map(fmean, by_prompt.values())) if by_prompt else 0.0


def common_reference(references: Sequence[Hashable | None]) -> float | None:
    """Share of the most frequent right answer: the accuracy of always giving it; None if some right answer is unknown.

    Example:
        >>> common_reference(["yes", "no", "yes", "yes"]), common_reference(["yes", None])
        (0.75, None)
    """
    return most_common(references)[1] if references and all(one is not None for one in references) else None
