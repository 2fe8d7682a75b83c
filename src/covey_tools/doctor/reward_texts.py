"""Texts that a reward function may be waiting for: written from a row's columns and the function's own constants."""

import json
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from covey.core.likeness import REFERENCES
from covey.rewards.functions import FunctionReward
from covey.rewards.text import completion_text
from covey.runtime.user_code import unwrap_partial
from covey_tools.doctor.examined import ExaminedRun

FORMS = (
    "{0}",
    "{0}\n",
    "The answer is {0}.",
    "\\boxed{{{0}}}",
    "<answer>{0}</answer>",
    "<think>\nIt is {0}.\n</think>\n<answer>\n{0}\n</answer>",
    "<think>\nIt is {0}.\n</think>\n{0}",
    "#### {0}",
    "Answer: {0}",
    "**{0}**",
    "```\n{0}\n```",
)
"""Ways to write an answer that rewards ask for."""

WILDCARD = r"(?:(?<!\\)\[(?:\\.|[^\]\\])+\]|\\[dwS]|(?<!\\)\.)(?:[*+]\??|\{[\d,]+\})?"
"""Parts of a pattern in whose place an answer may stand: `.*?`, `\\d+`, `[0-9.]*`."""

MOST_FURTHER = 256  # rows, or texts of a function's own constants, that are scored in addition
TEXTS = ("", "?", "yes", "42", "I do not know.", "so " * 200, "AaZz 0123456789 .,;:!?()[]{}<>\"'\n" * 3)


def right_answer(row: dict[str, Any]) -> str | None:
    """The content of the column of right answers, as it is written in the row."""
    name = next((name for name in REFERENCES if isinstance(row.get(name), str | int | float)), None)
    return None if name is None else str(row[name])


def texts_tried(run: ExaminedRun, function: int | None = None, most: int = 4) -> list[tuple[float, float, str]]:
    """For a few prompts the lowest and highest reward of other texts, and the text of the highest.

    Of all functions together, or of one alone.
    """
    base, found = run.base, []
    for start in range(0, min(base.prompts, most) * base.size, base.size):
        row = base.samples[start].row
        answers = [str(row[name]) for name in row if name != "prompt" and isinstance(row[name], str | int | float)]
        answers.sort(key=len)
        texts = [text for answer in answers[:4] for text in in_forms(answer)]
        texts += [*TEXTS, *(json.dumps({"answer": answer}) for answer in answers[:2])]
        own = [completion_text(one.completion) for one in base.rollouts[start : start + 2]]
        texts += [*own, *in_forms("0")]
        texts += [f"{text}\n{texts[n]}" for n, text in enumerate(own)]
        texts += [text for answer in answers[:2] for text in _of_constants(run, answer)]
        values = [held for name, held in row.items() if name != "prompt" and isinstance(held, str | int | float)]
        texts += [json.dumps({key: value}) for key in _keys(run) for value in values[:4]]
        totals = run.totals([row] * len(texts), [run.answering(row, text) for text in texts], function)
        known = [(value, text) for value, text in zip(totals.tolist(), texts, strict=True) if value == value]
        if known:
            found.append((min(known)[0], *max(known, key=lambda pair: pair[0])))
    return found or [(0.0, 0.0, "")]


def in_forms(answer: str) -> list[str]:
    return [form.format(answer) for form in FORMS]


def _of_constants(run: ExaminedRun, answer: str) -> list[str]:
    """An answer together with the texts and patterns that reward functions compare with."""
    texts = []
    for one in run.suite.functions:
        for constant in constants_of(one.function) if isinstance(one, FunctionReward) else ():
            texts += [constant + answer, answer + constant]
            if (matching := text_matching(constant, answer)) is not None:
                texts.append(matching)
    return texts[:MOST_FURTHER]


def _keys(run: ExaminedRun) -> list[str]:
    """Texts in reward functions that may be keys of JSON."""
    functions = [one.function for one in run.suite.functions if isinstance(one, FunctionReward)]
    return [text for function in functions for text in constants_of(function) if text.isidentifier()][:8]


def constants_of(function: Any) -> list[str]:
    """Texts in a function's body, and the texts and patterns of its module that it names.

    Example:
        >>> constants_of(lambda text: text.startswith("Answer: "))
        ['Answer: ']
    """
    code = getattr(unwrap_partial(function), "__code__", None)
    if code is None:
        return []
    module = getattr(unwrap_partial(function), "__globals__", {})
    bodies = [code]
    for body in bodies:  # which grows by the comprehensions and functions within
        bodies += [one for one in body.co_consts if isinstance(one, CodeType)]
    held = [one for body in bodies for one in (*body.co_consts, *(module.get(name) for name in body.co_names))]
    held = [one.pattern if isinstance(one, re.Pattern) else one for one in held]
    document = getattr(unwrap_partial(function), "__doc__", None)
    texts = [one for one in held if isinstance(one, str) and 0 < len(one) <= 200 and one != document]
    return [*dict.fromkeys(one for one in texts if "<locals>" not in one)]  # which are names of functions within


def text_matching(pattern: str, answer: str) -> str | None:
    """A text that a regular expression of literal marks and wildcards matches, with the answer in its wildcards.

    Example:
        >>> text_matching(r"^<a>(.*?)</a>\\s*$", "7"), text_matching(r"\\[(\\d+)\\]", "7"), text_matching("(", "7")
        ('<a>7</a>', '[7]', None)
    """
    try:
        compiled = re.compile(pattern)
    except re.error:
        return None
    text = re.sub(r"\(\?[aimsux]+\)|\\\W\?", "", pattern)  # flags, and marks that need not be there
    text = re.sub(WILDCARD, lambda found: answer, text)
    text = re.sub(r"\(\?:|(?<!\\)[\^$]|\\[AZb]", "", text)  # openings of groups, anchors
    text = re.sub(r"\\s[*?]+", "", re.sub(r"\\n[*+?]*", "\n", text))
    text = re.sub(r"\\s\+?", " ", text)
    text = re.sub(r"(?<!\\)[()]\??", "", text)
    text = re.sub(r"\\(\W)", r"\1", text)
    found = compiled.search(text)
    return text if found is not None and found.end() > found.start() else None


def otherwise(value: Any) -> list[Any]:
    """Other ways to hold a value of a column.

    Example:
        >>> otherwise("The sum is\\n#### 42")
        ['the sum is\\n#### 42', 'THE SUM IS\\n#### 42', '42', 42.0]
        >>> otherwise(42), otherwise([" Paris\\n"])
        (['42'], [' Paris\\n', 'Paris'])
    """
    if isinstance(value, list | tuple):
        return [one for item in value[:1] for one in (item, *otherwise(item)[-1:])]
    if not isinstance(value, str):
        return [str(value)] if isinstance(value, int | float) else []
    numbers = re.findall(r"-?\d+(?:\.\d+)?", value)[-1:]
    others = [value.lower(), value.upper(), value.strip(), *numbers, *map(float, numbers)]
    return [other for other in others if other != value]


def _last_number(text: str) -> str:
    return (re.findall(r"-?\d+(?:\.\d+)?", text) or [text])[-1]


WRITTEN: dict[str, Callable[[str], str]] = {
    "without spaces around it": str.strip,
    "in lower case": str.lower,
    "in upper case": str.upper,
    "with a capital": str.capitalize,
    "without spaces and case": lambda text: text.strip().lower(),
    "without a full stop": lambda text: text.strip().rstrip("."),
    "as its last number": _last_number,
}
"""Ways to write what a column holds, by how they are called."""
