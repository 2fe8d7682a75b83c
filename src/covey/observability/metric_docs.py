"""Descriptions of all metrics and how to interpret them: the tables of docs/metrics.md.

Keys are metric names; `{name}` stands for the name of a reward function or a phase. During an evaluation the same names
carry the prefix `eval_`.
"""

import functools
import re

from covey.runtime.files import shipped

OF_THE_LOOP = (
    "step",
    "total_flos",
    *("time", "config", "event", "cpu_seconds", "memory_gb"),  # of lines of the record
    *(f"train_{x}" for x in ("loss", "runtime", "samples_per_second", "steps_per_second")),
)


@functools.cache
def meanings() -> dict[str, str]:
    """Texts by name, from the rows before the section about users' own metrics."""
    page = shipped("docs/metrics.md").read_text(encoding="utf-8").partition("## Your own")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", page, re.MULTILINE))


def is_taken(name: str) -> bool:
    """True for a name that the trainer or Hugging Face's loop logs itself, rather than rewards and environments."""
    of_the_loop = name in OF_THE_LOOP or name.startswith("eval_")
    return (of_the_loop or meaning(name) is not None) and not name.startswith("environment/")


def meaning(name: str) -> str | None:
    name = name.removeprefix("eval_")
    return meanings().get(name) or next((text for key, text in _patterns() if key.fullmatch(name)), None)


def place(name: str) -> int:
    """Row of the page that describes a metric; the number of rows for one that none describes."""
    return next((row for row, (key, _) in enumerate(_patterns()) if key.fullmatch(name)), len(_patterns()))


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(re.escape(key).replace(r"\{name\}", r"(\d+)" if "@" in key else "(.+)")), text)
        for key, text in meanings().items()
    ]
