"""Names of metrics: their descriptions, which are the tables of docs/metrics.md, and the evaluation sets in a log.

Keys of descriptions are metric names; `{name}` stands for the name of a reward function or a phase. During an
evaluation the same names have the prefix `eval_`. Names of evaluation sets are found by the runtime and the reward that
every evaluation logs.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from covey.runtime.files import shipped

OF_THE_LOOP = (
    "step",
    "total_flos",
    *("time", "config", "event", "cpu_seconds", "run_seconds", "began", "memory_gb"),  # of lines of the record
    *(f"train_{x}" for x in ("loss", "runtime", "samples_per_second", "steps_per_second")),
)


@functools.cache
def meanings() -> dict[str, str]:
    """Texts by name, from the rows before the section about users' own metrics."""
    page = shipped("docs/metrics.md").read_text(encoding="utf-8").partition("## Your own")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", page, re.MULTILINE))


def is_taken(name: str) -> bool:
    """True for a name that the trainer or Hugging Face's code logs, rather than rewards or environments."""
    of_the_loop = name in OF_THE_LOOP or name.startswith("eval_")
    return (of_the_loop or meaning(name) is not None) and not name.startswith("environment/")


def meaning(name: str) -> str | None:
    name = name.removeprefix("eval_")
    return meanings().get(name) or next((text for key, text in _patterns() if key.fullmatch(name)), None)


def place(name: str) -> int:
    """Index of the row that describes a metric; the number of rows if none does."""
    return next((row for row, (key, _) in enumerate(_patterns()) if key.fullmatch(name)), len(_patterns()))


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(re.escape(key).replace(r"\{name\}", r"(\d+)" if "@" in key else "(.+)")), text)
        for key, text in meanings().items()
    ]


def evaluation_sets(log: Mapping[str, Any]) -> list[str]:
    """Names of the evaluation sets in a log; "" is the set without a name."""
    if "eval_loss" in log or "eval_reward" in log:
        return [""]
    names = [key[5:-7] for key in log if key.startswith("eval_") and key.endswith("_reward")]
    return [name for name in names if f"eval_{name}_loss" in log or f"eval_{name}_runtime" in log]


def all_sets(log_history: list[dict[str, Any]]) -> list[str]:
    """The sets of a whole run, in the order of their first evaluation."""
    return list(dict.fromkeys(name for log in log_history for name in evaluation_sets(log)))


def prefix(name: str) -> str:
    return f"eval_{name}_" if name else "eval_"


def metrics_of(name: str, log: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix(name)): value for key, value in log.items() if key.startswith(prefix(name))}


def with_interval(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of the shares (`pass@k`, `maj@k`) among the `metrics_of` a set, with their intervals."""
    return [
        (name, f"{value:.1%} ({100 * metrics[f'{name}_low']:.1f} to {100 * metrics[f'{name}_high']:.1f})")
        for name, value in metrics.items()
        if "@" in name and f"{name}_low" in metrics and f"{name}_high" in metrics
    ]
