"""Worker process that parses and compares mathematical expressions. Run by path; nothing imports it.

For each JSON line `{"gold": text, "answer": text}` it prints `{"gold": [...], "answer": [...], "correct": true}` with
the parsed expressions; `correct` is null if the gold text is no mathematics. Algebra can take unlimited time or memory
(`9^{9^{9^9}}`): memory is limited here, and the parent kills the process at a deadline.
"""

import functools
import json
import logging
import os
import sys

MEMORY_LIMIT = 6 << 30  # bytes of address space; importing sympy takes well under one


def limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@functools.lru_cache(maxsize=4096)
def parse_gold(text: str) -> list:
    """Parse a reference, LaTeX or a plain expression; cached, since a group shares it."""
    from math_verify import parse

    return parse(text, parsing_timeout=0)


def parse_answer(text: str) -> list:
    """Parse the boxed answer, else LaTeX announced as the final answer; formulas of the reasoning do not count."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=0)


def check(gold: str, answer: str) -> dict:
    from math_verify import verify

    gold_parsed = parse_gold(gold)
    if not gold_parsed:
        return {"gold": [], "answer": [], "correct": None}
    answer_parsed = parse_answer(answer)
    correct = bool(verify(gold_parsed, answer_parsed, timeout_seconds=0))
    return {"gold": as_texts(gold_parsed), "answer": as_texts(answer_parsed), "correct": correct}


def as_texts(parsed: list) -> list[str]:
    texts = []
    for item in parsed:
        try:
            texts.append(str(item)[:500])
        except ValueError:  # an integer of more digits than Python prints
            texts.append(type(item).__name__)
    return texts


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not look like a reply
    limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def reply(content: dict) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        return reply({"error": f"{error}; accuracy rewards need math-verify: pip install 'covey[math]'"})
    reply({"ready": True})
    for line in sys.stdin:
        try:
            reply(check(**json.loads(line)))
        except (Exception, RecursionError) as error:
            reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
