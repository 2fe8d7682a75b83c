"""Parsing and comparing mathematical expressions, for `covey.runtime.function_worker`; nothing imports it.

Algebra can take unlimited time or memory (`9^{9^{9^9}}`), so calls have a deadline and the process a memory limit.
"""

import functools
import logging
import re

try:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError(f"{error}; accuracy rewards need math-verify: pip install math-verify") from error
logging.getLogger("math_verify").setLevel(logging.ERROR)


BOX = re.compile(r"\\boxed\s*(?:\{|\Z)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # one after a backslash is a character


@functools.lru_cache(maxsize=4096)
def parse_gold(text: str) -> list:
    """Parse a reference, LaTeX or a plain expression; cached, since a group shares it."""
    return parse(text, parsing_timeout=0)


def parse_answer(text: str) -> list:
    """Parse the boxed answer, else LaTeX announced as the final answer; formulas of the reasoning do not count.

    A text that ends inside a box, because it was cut off, has no answer: an earlier box is not the final one.
    """
    if ends_within_a_box(text):
        return []
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=0)


def ends_within_a_box(text: str) -> bool:
    """True if the braces of the last `\\boxed{` are not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return False
    depth = 1
    for brace in BRACE.findall(text, boxes[-1].end()):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth == 0:
            return False
    return True


def check(gold: str, answer: str) -> dict:
    """The parsed expressions and the reward, which is None if `gold` cannot be parsed."""
    gold_parsed = parse_gold(gold)
    if not gold_parsed:
        return {"reward": None}
    answer_parsed = parse_answer(answer)
    reward = float(verify(gold_parsed, answer_parsed, timeout_seconds=0))
    return {"gold": as_texts(gold_parsed), "answer": as_texts(answer_parsed), "reward": reward}


def as_texts(parsed: list) -> list[str]:
    texts = []
    for item in parsed:
        try:
            texts.append(str(item)[:500])
        except ValueError:  # an integer of more digits than Python prints
            texts.append(type(item).__name__)
    return texts
