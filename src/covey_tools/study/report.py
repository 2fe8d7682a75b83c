"""The report of a study: which variant is ahead, whether the difference is real, and the tree of descent."""

import json
import math
import statistics
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.text import Text

from covey.core.estimates import interval_of_mean
from covey.observability.page.export import PageWriter
from covey.runtime.files import written_whole
from covey.runtime.user_code import warn
from covey_tools.study.commands import CURVES_FILE
from covey_tools.study.page import page_of, recorded
from covey_tools.study.variants import Variant

CURVES = {
    "reward": "Reward in training",
    "completions/mean_length": "Completion length (tokens)",
    "entropy": "Entropy (nats per token)",
    "kl": "KL to the reference",
}
"""Metrics that are drawn, and their titles."""


@dataclass(frozen=True)
class Difference:
    """Mean paired difference of a variant's rewards to the best one's, with its 95% interval over prompts."""

    mean: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """True if zero lies outside of the interval, which is wide enough for all comparisons at once."""
        return self.high < 0 or self.low > 0


def comparison(
    variants: Mapping[str, Variant], step: int | None = None, to: str | None = None
) -> tuple[str | None, dict[str, Difference]]:
    """The variant with the highest mean reward, or `to`, and the others' differences to it, on the same prompts.

    At `step`, or at each variant's last evaluation; the best one's of the same step is taken if it has one. Intervals
    are Student's, Bonferroni-corrected for all pairs of variants: the best one is known from the same rewards.
    """
    last = {name: step or max(variant.evaluations, default=0) for name, variant in variants.items()}
    rewards = {name: variants[name].evaluations.get(at, []) for name, at in last.items()}
    rewards = {name: own for name, own in rewards.items() if any(one == one for one in own)}
    if not rewards:
        return None, {}
    best = to or max(rewards, key=lambda name: _mean(rewards[name]))
    share = 0.05 / max(math.comb(len(rewards), 2), 1)
    differences = {}
    for name, own in rewards.items():
        others = variants[best].evaluations.get(last[name]) or rewards[best]
        pairs = [a - b for a, b in zip(own, others, strict=True) if a == a and b == b]
        if name != best and len(pairs) > 1:
            interval = interval_of_mean(pairs, _student(share, len(pairs) - 1))
            differences[name] = Difference(statistics.fmean(pairs), *interval)
    return best, differences


@lru_cache
def _student(share: float, freedom: int, steps: int = 20_000) -> float:
    """Value that Student's t with `freedom` degrees of freedom exceeds, in size, with this probability.

    The angle a = atan(t / sqrt(freedom)) has a density proportional to cos(a) ** (freedom - 1), which is summed here.
    """
    density = [math.sin((i + 0.5) * math.pi / 2 / steps) ** (freedom - 1) for i in range(steps)]  # from t = infinity
    place = bisect(list(accumulate(density)), share * sum(density))
    return math.sqrt(freedom) / math.tan((place + 0.5) * math.pi / 2 / steps)


def _mean(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else float("-inf")


def table(variants: Mapping[str, Variant]) -> str:
    """One line for each variant, below its parent. None is the best while an interval to the highest includes zero."""
    best, differences = comparison(variants)
    is_best = bool(differences) and all(difference.is_real for difference in differences.values())
    title = f"difference to {_cell(best)}" if differences and best else "difference"
    lines = [f"variant | status | step | mean reward | {title} | settings", "-|-|-:|-:|-|-"]
    for depth, variant in descent(variants):
        last = variant.evaluations.get(max(variant.evaluations, default=-1), [])
        other = differences.get(variant.name)
        difference = "best" if is_best and variant.name == best else ""
        if other is not None:
            verdict = "real" if other.is_real else "not certain"
            difference = f"{other.mean:+.3f} [{other.low:+.3f}, {other.high:+.3f}], {verdict}"
        changes = ", ".join(f"{name}={value}" for name, value in variant.changes.items())
        cells = [
            "&nbsp;&nbsp;" * depth + variant.name,
            variant.status + (f": {variant.reason.splitlines()[0][:120]}" if variant.reason else ""),
            str(variant.step),
            f"{_mean(last):.3f}" if any(one == one for one in last) else "",
            difference,
            changes,
        ]
        lines.append(" | ".join(map(_cell, cells)))
    return "\n".join(lines)


def rich_table(text: str) -> Any:
    """The same table as a terminal shows it."""
    from rich.table import Table

    head, _, *rows = text.splitlines()
    shown = Table(*head.split(" | "))
    for row in rows:
        shown.add_row(*(Text(cell.replace("&nbsp;", " ")) for cell in row.split(" | ")))
    return shown


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "/")


def descent(variants: Mapping[str, Variant]) -> list[tuple[int, Variant]]:
    """Every variant with its depth, each clone below its parent."""

    def below(parent: str | None, depth: int) -> list[tuple[int, Variant]]:
        children = [variant for variant in variants.values() if variant.parent == parent]
        return [pair for child in children for pair in [(depth, child), *below(child.name, depth + 1)]]

    return below(None, 0)


def write_report(folder: Path, number: int, variants: Mapping[str, Variant], page: PageWriter | None = None) -> None:
    """Write `study.md`: the table, and the history of each variant; `curves.json`; and the `page` of both."""
    history = [f"- {variant.name}, {_one_line(line)}" for variant in variants.values() for line in variant.history]
    parts = [f"# Study after round {number}", table(variants)]
    if history:
        parts += ["## Interventions", "\n".join(history)]
    with written_whole(folder / CURVES_FILE) as new:
        new.write_text(json.dumps(curves_of(variants)))
    with written_whole(folder / "study.md") as new:
        new.write_text("\n\n".join(parts) + "\n")
    if page is None:
        return
    try:
        page.write(recorded(folder), page_of(folder))
    except Exception as error:  # a page ends no study
        warn(f"the page of the study could not be written: {error!r}")


def curves_of(variants: Mapping[str, Variant]) -> list[dict[str, Any]]:
    """Charts of all variants, with points (step, value) of each; a clone's curve begins where its parent was."""
    charts: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def add(title: str, name: str, step: int, value: float) -> None:
        if math.isfinite(value):
            charts.setdefault(title, {}).setdefault(name, []).append((step, value))

    for name, variant in variants.items():
        for step, rewards in variant.evaluations.items():
            add("Mean reward in evaluations", name, step, _mean(rewards))
        for point in variant.curve:
            for key, title in CURVES.items():
                if key in point:
                    add(title, name, int(point["step"]), point[key])
    drawn = {
        title: series for title, series in charts.items() if any(y for points in series.values() for _, y in points)
    }
    return [{"title": title, "series": series} for title, series in drawn.items()]
