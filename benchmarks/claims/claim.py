"""A claim as a value, and its verdict from the records of its runs."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from benchmarks.claims.exact import Exact
from benchmarks.claims.statistic import (
    FAILS,
    HOLDS,
    LEVEL,
    OPEN,
    TWO_LOOKS,
    Interval,
    Kind,
    crossed,
    fisher,
    median,
    ratio_of_means,
    seeds_to_decide,
    verdict,
    weakest,
)

Result = dict[str, Any]
"""Outcome of a run, as JSON: what its bed has written down."""
Runs = Mapping[tuple[str, int], Result]
"""Outcomes by arm and seed."""
PILOT = 99
"""Seed of runs that set a threshold; no statistic uses it."""


class Bed(Protocol):
    """A task with its fixed settings. A dataclass, so that the digest of a claim covers it."""

    name: ClassVar[str]
    at_once: ClassVar[int]  # runs in one process

    def run(self, arms: Mapping[str, Mapping[str, Any]], runs: Sequence[tuple[str, int]], folder: str) -> Runs: ...


class Measure(Protocol):
    """A number for each pair of two runs, or one for each prompt. A dataclass, for the digest."""

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> "Sequence[float]": ...


@dataclass(frozen=True)
class Best:
    """The best of several arms by mean last score on the seeds `chosen_on`, which are left out of the comparison.

    Without such seeds each seed has a best arm of its own, by its own score.
    """

    arms: tuple[str, ...]
    chosen_on: tuple[int, ...] = (0, 1)


Arm = str | Best


@dataclass(frozen=True)
class Part:
    """A hypothesis about the difference of two arms (of one, where `against` is None), decided by its interval.

    `way` is the statistic: "seeds" for differences at the same seeds (and prompts), "median" where runs may never
    arrive, "pairs" for the logarithm of a ratio of means over pairs of one run.
    """

    name: str
    hypothesis: str
    kind: Kind
    delta: float
    measure: Measure
    arm: Arm
    against: Arm | None = None
    unit: str = ""
    way: str = "seeds"
    shift: float = 0.0  # subtracted from the differences: the hypothesis is about a threshold other than 0


@dataclass(frozen=True)
class Count:
    """A hypothesis about the number of seeds whose measure is above a bound; nothing is undecided."""

    name: str
    hypothesis: str
    measure: Measure
    arm: str
    at_least: int = 0
    at_most: int = 10**6
    against: str | None = None
    above: float = 0.0


@dataclass(frozen=True)
class Shares:
    """A hypothesis that more seeds of an arm than of another are above a bound (Fisher's exact test at 2.5%)."""

    name: str
    hypothesis: str
    measure: Measure
    arm: str
    against: str
    above: float = 0.0


@dataclass(frozen=True)
class Enumerated:
    """A hypothesis that an enumeration answers; its figures are not a sample."""

    name: str
    hypothesis: str
    check: Callable[[], Exact]


AnyPart = Part | Count | Shares | Enumerated


@dataclass(frozen=True)
class Condition:
    """A precondition: the mean of a measure over an arm's seeds is in bounds, or the claim stays undecided."""

    text: str
    measure: Measure
    arm: str
    low: float = -np.inf
    high: float = np.inf


@dataclass(frozen=True)
class Claim:
    """A claim of a paper with everything that decides it, fixed before its first run."""

    number: int
    statement: str
    source: str  # papers, as Markdown
    parts: tuple[AnyPart, ...]
    other_reading: str
    minutes: float  # of two cores without other work, estimated before the first run
    bed: Bed | None = None
    arms: Mapping[str, Mapping[str, Any]] | None = None
    seeds: int = 4
    pilots: tuple[str, ...] = ()  # arms that run once with the seed `PILOT`
    conditions: tuple[Condition, ...] = ()
    notes: tuple[Enumerated, ...] = ()  # enumerations that belong to the claim and decide nothing
    changed: str = ""  # against the first plan, with the reason; decided before the first run
    missing: str = ""  # why there are no runs
    seen: str = ""  # in the runs, beyond what the hypotheses ask; written after them, decides nothing
    methods: tuple[str, ...] = ()  # settings that the claim is about, such as `loss_type=dapo`
    extends: bool = True  # once, from `seeds` to twice as many, if undecided

    @property
    def digest(self) -> str:
        """Fingerprint of what decides the claim; prose about it is left out."""
        decided = {"seeds": self.seeds, "pilots": self.pilots, "arms": self.arms, "bed": self.bed}
        decided |= {"parts": self.parts, "conditions": self.conditions, "extends": self.extends}
        text = json.dumps(_plain(decided), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def planned(self, seeds: int) -> list[tuple[str, int]]:
        """Runs of so many seeds, pilots first."""
        compared = {name for part in self.parts if not isinstance(part, Enumerated) for name in arms_of(part)}
        arms = [name for name in self.arms or () if name in compared or name not in self.pilots]
        return [(arm, PILOT) for arm in self.pilots] + [(arm, seed) for seed in range(seeds) for arm in arms]


@dataclass(frozen=True)
class Answer:
    """Verdict of one part, its interval at 95% (None without one) and a sentence."""

    part: AnyPart
    verdict: str | None  # None: not run
    interval: Interval | None
    sentence: str
    seeds: int = 0
    more: int | None = None  # seeds that would decide it, if they are like the others


def answers(claim: Claim, runs: Runs, enumerated: Mapping[str, Exact]) -> list[Answer]:
    """One answer a part. `enumerated` holds the recorded outcomes of its enumerations by name."""
    found = []
    for part in claim.parts:
        if isinstance(part, Enumerated):
            one = enumerated.get(part.name)
            word = None if one is None else HOLDS if one.holds else FAILS
            found.append(Answer(part, word, None, "not run yet" if one is None else one.sentence))
        elif isinstance(part, Count):
            found.append(_counted(claim, part, runs))
        elif isinstance(part, Shares):
            found.append(_shared(claim, part, runs))
        else:
            found.append(_measured(claim, part, runs))
    return found


def verdict_of(claim: Claim, parts: Sequence[Answer], failed: Sequence[str]) -> str | None:
    """Verdict of the whole claim, None while a part has not run; a failed precondition leaves it undecided."""
    words = [one.verdict for one in parts if one.verdict is not None]
    if not words or len(words) < len(parts):
        return None
    return OPEN if failed else weakest(words)


def failed_conditions(claim: Claim, runs: Runs) -> list[str]:
    """Preconditions that do not hold, with the figure; none while their runs are missing."""
    found = []
    for one in claim.conditions:
        values = [
            np.mean(one.measure(r, None, [])) for (arm, seed), r in runs.items() if arm == one.arm and seed != PILOT
        ]
        if values and not one.low <= (figure := float(np.mean(values))) <= one.high:
            found.append(f"{one.text}: {figure:.3g}")
    return found


def arms_of(part: Part | Count | Shares) -> tuple[str, ...]:
    """Arms that a part compares."""
    return (*_arms(part.arm), *_arms(part.against))


def _arms(arm: Arm | None) -> tuple[str, ...]:
    return () if arm is None else (arm,) if isinstance(arm, str) else arm.arms


def _complete(claim: Claim, part: Part | Count | Shares, runs: Runs) -> int:
    """Seeds that all arms of a part have: 0, `seeds` or twice as many."""
    arms = arms_of(part)
    has = [all((arm, seed) in runs for arm in arms) for seed in range(2 * claim.seeds)]
    if not all((arm, PILOT) in runs for arm in claim.pilots) or not all(has[: claim.seeds]):
        return 0
    return 2 * claim.seeds if all(has) and claim.extends else claim.seeds


def _chosen(arm: Arm, runs: Runs, seed: int) -> str:
    """Arm that stands for a `Best` at a seed."""
    if isinstance(arm, str):
        return arm
    seeds = arm.chosen_on or (seed,)
    return max(arm.arms, key=lambda name: np.mean([np.mean(runs[name, one]["evaluations"][-1][1]) for one in seeds]))


def differences(claim: Claim, part: Part, runs: Runs, seeds: int) -> tuple[np.ndarray, str]:
    """Table [S, P] of a part's differences over the first `seeds` seeds, and the arms that were chosen, in words."""
    given = [arm for arm in (part.arm, part.against) if arm is not None]
    left_out = {seed for arm in given if isinstance(arm, Best) for seed in arm.chosen_on}
    pilots = [runs[name, PILOT] for name in claim.pilots]
    rows, chosen = [], set()
    for seed in (seed for seed in range(seeds) if seed not in left_out):
        names = [_chosen(arm, runs, seed) for arm in given]
        chosen |= {name for name, arm in zip(names, given, strict=True) if isinstance(arm, Best)}
        one, *other = (runs[name, seed] for name in names)
        rows.append(part.measure(one, other[0] if other else None, pilots))
    words = f" (best: {', '.join(sorted(chosen))})" if chosen else ""
    return np.array(rows, dtype=float) - part.shift, words


def _interval(part: Part, table: np.ndarray, level: float) -> Interval:
    if part.way == "median":
        return median(list(table.mean(1)), level)
    return crossed(table, level)


def _measured(claim: Claim, part: Part, runs: Runs) -> Answer:
    if part.way == "pairs":
        return _paired(part, runs)
    seeds = _complete(claim, part, runs)
    if not seeds:
        return Answer(part, None, None, "not run yet")
    level = TWO_LOOKS if claim.extends else LEVEL
    table, chosen = differences(claim, part, runs, claim.seeds)
    decided = _interval(part, table, level)
    word, used = verdict(part.kind, decided, part.delta), claim.seeds
    if word == OPEN and seeds > claim.seeds:
        table, chosen = differences(claim, part, runs, seeds)
        decided = _interval(part, table, level)
        word, used = verdict(part.kind, decided, part.delta), seeds
    shown = _interval(part, table, LEVEL)
    more = seeds_to_decide(part.kind, decided, part.delta, used) if word == OPEN else None
    prompts = f" × {table.shape[1]} prompts" if table.shape[1] > 1 else ""
    small = ", smaller than δ" if word == HOLDS and part.kind == "superiority" and shown.high < part.delta else ""
    sentence = f"{_figure(part, shown)}, {len(table)} seeds{prompts}{chosen}{small}"
    return Answer(part, word, shown, sentence, used, more)


def _figure(part: Part, shown: Interval) -> str:
    mean, low, high = (value + part.shift for value in (shown.mean, shown.low, shown.high))
    unit = f" {part.unit}" if part.unit else ""
    if part.unit.startswith("×"):  # logarithms: shown as factors
        factor, of = [f"{np.exp(value):.3g}" for value in (mean, low, high)], part.unit[1:].strip()
        return f"× {factor[0]} ({factor[1]} to {factor[2]}){' ' + of if of else ''}"
    return f"{mean:+.3g} ({low:+.3g} to {high:+.3g}){unit}"


def _paired(part: Part, runs: Runs) -> Answer:
    arm, other = part.arm, part.against
    assert isinstance(arm, str) and isinstance(other, str), "pairs are of two named arms"
    if (arm, 0) not in runs or (other, 0) not in runs:
        return Answer(part, None, None, "not run yet")
    over, under = (np.array(part.measure(runs[name, 0], None, [])) for name in (arm, other))
    found = ratio_of_means(over, under)
    moved = Interval(found.mean - part.shift, found.low - part.shift, found.high - part.shift, found.level)
    return Answer(part, verdict(part.kind, moved, part.delta), moved, f"{_figure(part, moved)}, {len(over)} pairs")


def _counted(claim: Claim, part: Count, runs: Runs) -> Answer:
    if not _complete(claim, part, runs):
        return Answer(part, None, None, "not run yet")
    pilots = [runs[name, PILOT] for name in claim.pilots]
    values = [
        float(np.mean(part.measure(runs[part.arm, s], runs[part.against, s] if part.against else None, pilots)))
        for s in range(claim.seeds)
    ]
    count = sum(value > part.above for value in values)
    figures = ", ".join(f"{value:.4g}" for value in values)
    word = HOLDS if part.at_least <= count <= part.at_most else FAILS
    return Answer(part, word, None, f"{figures}: {count} of {claim.seeds} above {part.above:g}", claim.seeds)


def _shared(claim: Claim, part: Shares, runs: Runs) -> Answer:
    seeds = _complete(claim, part, runs)
    if not seeds:
        return Answer(part, None, None, "not run yet")

    def count(arm: str, number: int) -> int:
        return sum(np.mean(part.measure(runs[arm, seed], None, [])) > part.above for seed in range(number))

    word, used = OPEN, 0
    for used in sorted({claim.seeds, seeds}):
        more, fewer = count(part.arm, used), count(part.against, used)
        if fisher(more, fewer, used) <= (0.0125 if claim.extends else 0.025):
            word = HOLDS
        elif fisher(fewer, more, used) <= (0.0125 if claim.extends else 0.025) or more == fewer == 0:
            word = FAILS
        if word != OPEN:
            break
    sentence = f"{more} of {used} seeds against {fewer} of {used}, p = {fisher(more, fewer, used):.3f}"
    return Answer(part, word, None, sentence, used)


def _plain(value: Any) -> Any:
    """A value as JSON, dataclasses with their names and functions by theirs."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__} | {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if callable(value):
        function = getattr(value, "func", value)
        return [function.__qualname__, _plain(list(getattr(value, "args", ())))]
    return value
