"""The report of a study: which variant is ahead, whether the difference is real, and the tree of descent."""

import math
import statistics
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from covey.core.estimates import interval_of_mean
from covey.study.variants import Variant


@dataclass(frozen=True)
class Difference:
    """Mean paired difference of a variant's rewards to the best one's, with its 95% interval over prompts."""

    mean: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """Zero is outside of the interval, which is wide enough for all comparisons at once."""
        return self.high < 0 or self.low > 0


def comparison(variants: Mapping[str, Variant], step: int | None = None) -> tuple[str | None, dict[str, Difference]]:
    """The variant with the highest mean reward, and the others' differences to it, on the same prompts.

    At `step`, or at each variant's last evaluation. Intervals are Student's, Bonferroni-corrected for all pairs of
    variants: the best one is known from the same rewards.
    """
    rewards = {}
    for name, variant in variants.items():
        at = max(variant.evaluations, default=None) if step is None else step
        if at in variant.evaluations:
            rewards[name] = variant.evaluations[at]
    if not rewards:
        return None, {}
    best = max(rewards, key=lambda name: _mean(rewards[name]))
    share = 0.05 / max(math.comb(len(rewards), 2), 1)
    differences = {}
    for name, own in rewards.items():
        pairs = [a - b for a, b in zip(own, rewards[best], strict=True) if a == a and b == b]
        if name != best and len(pairs) > 1:
            differences[name] = Difference(
                statistics.fmean(pairs), *interval_of_mean(pairs, _student(share, len(pairs) - 1))
            )
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
    """One line for each variant, below its parent."""
    best, differences = comparison(variants)
    lines = ["variant | status | step | mean reward | difference to the best | settings", "-|-|-:|-:|-|-"]
    for depth, variant in descent(variants):
        last = variant.evaluations.get(max(variant.evaluations, default=-1))
        other = differences.get(variant.name)
        difference = "best" if variant.name == best else ""
        if other is not None:
            verdict = "real" if other.is_real else "not certain"
            difference = f"{other.mean:+.3f} [{other.low:+.3f}, {other.high:+.3f}], {verdict}"
        changes = ", ".join(f"{name}={value}" for name, value in variant.changes.items())
        cells = [
            "&nbsp;&nbsp;" * depth + variant.name,
            variant.status + (f": {variant.reason.splitlines()[0][:120]}" if variant.reason else ""),
            str(variant.step),
            f"{_mean(last):.3f}" if last else "",
            difference,
            changes,
        ]
        lines.append(" | ".join(cell.replace("|", "/") for cell in cells))
    return "\n".join(lines)


def descent(variants: Mapping[str, Variant]) -> list[tuple[int, Variant]]:
    """Every variant with its depth, each clone below its parent."""

    def below(parent: str | None, depth: int) -> list[tuple[int, Variant]]:
        children = [variant for variant in variants.values() if variant.parent == parent]
        return [pair for child in children for pair in [(depth, child), *below(child.name, depth + 1)]]

    return below(None, 0)


def write_report(folder: Path, number: int, variants: Mapping[str, Variant]) -> None:
    """Write `study.md`: the table, and the history of each variant."""
    history = [f"- {variant.name}, {line}" for variant in variants.values() for line in variant.history]
    parts = [f"# Study after round {number}", table(variants)]
    if history:
        parts += ["## Interventions", "\n".join(history)]
    (folder / "study.md").write_text("\n\n".join(parts) + "\n")
