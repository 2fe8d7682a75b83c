"""Plans of studies: the variants of a grid, a list or random draws, and early stopping by successive halving."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covey.config.messages import closest
from covey_tools.study.report import comparison

if TYPE_CHECKING:
    from covey_tools.study.study import Study


EXAMPLES = {
    "variants": "{small: {peft: {r: 2}}, fast: {learning_rate: 1e-3}}",
    "grid": "{learning_rate: [1e-5, 1e-4], peft.r: [8, 32]}",
    "random": "{count: 8, learning_rate: {min: 1e-6, max: 1e-4, log: true}}",
}
KEYS = (*EXAMPLES, "eval_steps", "save_rounds", "halving")


def variants_of(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants by name: those listed in `variants`, all of `grid`, and different draws of `random`.

    Example:
        >>> variants_of({"grid": {"beta": [0.0, 0.1], "peft.r": 8}})["beta=0.1,r=8"]
        {'beta': 0.1, 'peft': {'r': 8}}
    """
    for key, example in EXAMPLES.items():
        if not isinstance(given := plan.get(key), Mapping | None):
            raise ValueError(f"study: {key}={given!r} must be a mapping, such as {example}.")
    found: dict[str, dict[str, Any]] = {}
    for name, changes in (plan.get("variants") or {}).items():
        if not isinstance(name, str | int | float) or isinstance(name, bool):
            raise ValueError(f"study: the name of a variant is read as {name!r}: put it in quotes.")
        if not isinstance(changes, Mapping | None):
            raise ValueError(
                f"study: variants: {name}={changes!r} must be a mapping of settings, such as {{learning_rate: 1e-3}}."
            )
        found[str(name)] = dict(changes or {})
    grid = {key: value if isinstance(value, list) else [value] for key, value in (plan.get("grid") or {}).items()}
    if empty := [key for key, values in grid.items() if not values]:
        raise ValueError(f"study: grid: {empty[0]}=[] has no values: name some, or leave {empty[0]} out.")
    for point in itertools.product(*grid.values()) if grid else ():
        name, changes = _named(dict(zip(grid, point, strict=True)))
        if name in found:
            raise ValueError(f"study: two variants are called {name!r}: leave one out, or give it another name.")
        found[name] = changes
    if plan.get("random"):
        _add_draws(dict(plan["random"]), found)
    return found


def _add_draws(ranges: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    is_chosen = "count" in ranges
    count, seed = ranges.pop("count", 8), ranges.pop("seed", 0)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in (count, seed)) or count < 1:
        raise ValueError(f"study: random: count={count!r}, seed={seed!r}: both are whole numbers, and count 1 or more.")
    if not ranges:
        raise ValueError(f"study: random names no setting to draw; write one, as in {EXAMPLES['random']}.")
    source, wanted = random.Random(seed), len(found) + count
    for _ in range(100 * count):
        name, changes = _named({name: _draw(name, choices, source) for name, choices in ranges.items()})
        found.setdefault(name, changes)
        if len(found) == wanted:
            return
    if not is_chosen:  # the default is the most
        return
    raise ValueError(
        f"study: random: count={count}, but only {len(found) - wanted + count} further variants were found in"
        f" {100 * count} draws. Lower count, or give more values."
    )


def _named(choice: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and settings of a point, whose keys with a dot belong to a mapping."""
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in choice.items())
    changes: dict[str, Any] = {}
    for key, value in choice.items():
        outer, dot, inner = key.partition(".")
        changes[outer] = {**changes.get(outer, {}), inner: value} if dot else value
    return "".join("_" if one.isspace() or one in "/\\|" else one for one in name), changes


def refuse_unknown(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        hint = closest(unknown[0], known)
        raise ValueError(f"{where}: there is no {unknown[0]!r}; there are {', '.join(known)}.{hint}")


def _draw(name: str, choices: Any, source: random.Random) -> Any:
    if isinstance(choices, list) and choices:
        return source.choice(choices)
    if isinstance(choices, Mapping):
        refuse_unknown(f"study: random: {name}", choices, ("min", "max", "log"))
    try:
        low, high, log = float(choices["min"]), float(choices["max"]), choices.get("log", False)
        if not (low < high and isinstance(log, bool)):
            raise ValueError("min must be below max, and log true or false")
        drawn = math.exp(source.uniform(math.log(low), math.log(high))) if log else source.uniform(low, high)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"study: random: {name}: {choices!r} is no range; write a list of values, or {{min: 1e-6, max: 1e-4, log:"
            f" true}}.{closest(name, ('count', 'seed'))}"
        ) from error
    return float(f"{drawn:.3g}")


def halving_of(given: Any) -> "Halving | None":
    """The rule that a plan names: none, a share to keep, or its settings."""
    if given is None or given is False:
        return None
    settings = given if isinstance(given, Mapping) else {} if given is True else {"keep": given}
    refuse_unknown("study: halving", settings, ("keep", "certain"))
    return Halving(**settings)


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
        if not isinstance(self.certain, bool):
            raise ValueError(f"halving: certain={self.certain!r} must be true or false.")

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
