"""Plans of studies: the variants of a grid, a list or random draws, and early stopping by successive halving."""

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covey.study.report import comparison

if TYPE_CHECKING:
    from covey.study.study import Study


def variants_of(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants by name: those listed in `variants`, all of `grid`, and the draws of `random`.

    Example:
        >>> variants_of({"grid": {"beta": [0.0, 0.1], "peft.r": 8}})["beta=0.1,r=8"]
        {'beta': 0.1, 'peft': {'r': 8}}
    """
    found = {str(name): dict(changes or {}) for name, changes in (plan.get("variants") or {}).items()}
    choices = []
    if grid := plan.get("grid"):
        values = [value if isinstance(value, list) else [value] for value in grid.values()]
        choices += [dict(zip(grid, point, strict=True)) for point in itertools.product(*values)]
    if drawn := dict(plan.get("random") or {}):
        source, count = random.Random(drawn.pop("seed", 0)), int(drawn.pop("count", 8))
        choices += [{name: _draw(name, range_, source) for name, range_ in drawn.items()} for _ in range(count)]
    for choice in choices:
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in choice.items())
        found["".join("_" if one.isspace() or one in "/\\|" else one for one in name)] = _nested(choice)
    return found


def _nested(choice: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key, value in choice.items():
        outer, dot, inner = key.partition(".")
        if dot:
            changes[outer] = {**changes.get(outer, {}), inner: value}
        else:
            changes[key] = value
    return changes


def _draw(name: str, choices: Any, source: random.Random) -> Any:
    if isinstance(choices, list):
        return source.choice(choices)
    try:
        low, high, log = float(choices["min"]), float(choices["max"]), choices.get("log", False)
        drawn = math.exp(source.uniform(math.log(low), math.log(high))) if log else source.uniform(low, high)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"random: {name}: {choices!r} is no range; write a list of values, or {{min: 1e-6, max: 1e-4, log: true}}."
        ) from error
    return float(f"{drawn:.3g}")


@dataclass(frozen=True)
class Halving:
    """Stops, at each evaluation, the variants beyond the best share `keep` that are really worse than another one.

    With `certain=False` it stops them whether or not the difference is real (Jamieson and Talwalkar, arXiv 1502.07943).
    Variants that come to a step later, as whole models do, are compared with all that were evaluated there (Li et al.,
    arXiv 1810.05934).
    """

    keep: float = 0.5
    certain: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep < 1:
            raise ValueError(f"halving: keep={self.keep!r} is the share of variants to keep; give one such as 0.5.")

    def __call__(self, study: "Study") -> list[str]:
        live = {name: variant for name, variant in study.variants.items() if variant.live}
        stopped = []
        latest = {name: max(variant.evaluations, default=0) for name, variant in live.items()}
        latest = {name: step for name, step in latest.items() if step > max(live[name].resumed_at, 0)}
        for step in sorted({*latest.values()}):
            known = {name: variant for name, variant in study.variants.items() if step in variant.evaluations}
            before = max((one for v in study.variants.values() for one in v.evaluations if one < step), default=0)
            if any(before <= variant.step <= step for name, variant in live.items() if name not in known):
                continue  # it will be evaluated there, too
            _, differences = comparison(known, step)
            order = sorted(differences, key=lambda name: -differences[name].mean)
            pairs = [pair for other in known for pair in comparison(known, step, to=other)[1].items()]
            worse = {name for name, difference in pairs if difference.high < 0}
            for name in order[max(math.ceil(len(known) * self.keep), 1) - 1 :]:  # the best one is not among them
                if latest.get(name) == step and (name in worse or not self.certain):
                    stopped.append(name)
        return stopped
