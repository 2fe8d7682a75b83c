"""Coverage of the claims' intervals, and false verdicts, on simulated differences with a known effect.

    python -m benchmarks.claims.simulation [--repetitions 4000]      # writes benchmarks/claims_simulation.json

Differences are an effect plus normal deviations of seeds, of prompts (shared by the seeds) and of single cells, with
the spreads that studies have (benchmarks/halving.json: .06 to .12 for a prompt at one seed). Cases named `real` take
single cells from that file: the differences by prompt of the two best variants of a task, less their mean. Rules
compared:

- coverage: the interval of `statistic.py`;
- wider: the wider one of a percentile bootstrap over seeds and prompts and Student's t over the means of seeds;
- false: verdicts of `statistic.py` with the one extension, at the effect at which a false one is most frequent.
"""

import argparse
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims.statistic import (
    FAILS,
    HOLDS,
    LEVEL,
    OPEN,
    TWO_LOOKS,
    Interval,
    Kind,
    student_t,
    variance_of_mean,
    verdict,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "claims_simulation.json"
SPREADS = {  # of seeds, of prompts, of single cells
    "no seed, no prompt": (0.0, 0.0, 0.1),
    "small seed": (0.01, 0.03, 0.1),
    "seed": (0.02, 0.05, 0.1),
    "large seed": (0.05, 0.05, 0.1),
    "prompts": (0.0, 0.1, 0.1),
    "seed alone": (0.05, 0.0, 0.02),
}
SIZES = ((4, 1), (8, 1), (4, 32), (6, 32), (8, 32), (4, 80), (8, 80))
"""Seeds and prompts; one prompt: a number for each seed, without a spread of prompts."""
DELTA = 0.05


@cache
def quantile(level: float, freedom: float) -> float:
    return student_t(level, freedom)


def half_widths(tables: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Half width of the `crossed` interval of each of `tables[N, S, P]`."""
    variance, freedom = variance_of_mean(tables)
    factors = np.array([quantile(level, round(float(one), 1)) for one in freedom])
    return factors * np.sqrt(variance)


def tables(random: np.random.Generator, count: int, seeds: int, prompts: int, spread: tuple[float, ...]) -> np.ndarray:
    """`count` tables of differences without an effect."""
    of_seed, of_prompt, of_cell = spread if prompts > 1 else (spread[0], 0.0, spread[2])
    return (
        random.normal(0, of_seed, (count, seeds, 1))
        + random.normal(0, of_prompt, (count, 1, prompts))
        + random.normal(0, of_cell, (count, seeds, prompts))
    )


def wider_covers(random: np.random.Generator, table: np.ndarray, resamples: int = 400) -> bool:
    """Coverage of 0 by the rule that was given up."""
    seeds, prompts = table.shape
    by_seed, mean = table.mean(1), table.mean()
    half = quantile(LEVEL, seeds - 1.0) * by_seed.std(ddof=1) / math.sqrt(seeds)
    some = random.multinomial(seeds, np.ones(seeds) / seeds, resamples) / seeds
    others = random.multinomial(prompts, np.ones(prompts) / prompts, resamples) / prompts
    low, high = np.quantile(np.einsum("rs,sp,rp->r", some, table, others, optimize=True), [0.025, 0.975])
    return min(low, mean - half) <= 0 <= max(high, mean + half)


def procedure(kind: Kind, effect: float, first: np.ndarray, second: np.ndarray) -> list[str]:
    """Verdicts with the one extension: after the first seeds, and where these are undecided after all."""
    words = []
    means, halves = first.mean((1, 2)) + effect, half_widths(first, TWO_LOOKS)
    later, wider = second.mean((1, 2)) + effect, half_widths(second, TWO_LOOKS)
    for number in range(len(first)):
        looks = ((means[number], halves[number]), (later[number], wider[number]))
        found = [verdict(kind, Interval(mean, mean - half, mean + half), DELTA) for mean, half in looks]
        words.append(found[0] if found[0] != OPEN else found[1])
    return words


FALSE: dict[str, tuple[Kind, float, str]] = {
    "superiority, no effect: holds": ("superiority", 0.0, HOLDS),
    "superiority, effect δ: does not hold": ("superiority", DELTA, FAILS),
    "non-inferiority, effect -δ: holds": ("non-inferiority", -DELTA, HOLDS),
    "non-inferiority, no effect: does not hold": ("non-inferiority", 0.0, FAILS),
    "equivalence, effect δ: holds": ("equivalence", DELTA, HOLDS),
    "equivalence, no effect: does not hold": ("equivalence", 0.0, FAILS),
    "difference, no effect: holds": ("difference", 0.0, HOLDS),
}
"""False verdicts at the effect at which they are most frequent."""


def real_tables(random: np.random.Generator, count: int, seeds: int) -> np.ndarray:
    """Differences by prompt of the two best variants of random tasks, 32 prompts, with random signs of whole rows."""
    studies = [one for one in json.loads((ROOT / "halving.json").read_text()) if not one["halving"]]
    rows = []
    for one in studies:
        last = [np.array(list(e.values())[-1]) for e in one["evaluations"].values() if e]
        best = sorted(last, key=lambda rewards: -rewards.mean())
        rows.append(best[0] - best[1] - (best[0] - best[1]).mean())
    drawn = random.integers(len(rows), size=(count, seeds))
    prompts = random.integers(32, size=(count, seeds, 32))
    cells = np.take_along_axis(np.array(rows)[drawn], prompts, 2)
    return cells * random.choice([-1.0, 1.0], size=cells.shape) + random.normal(0, 0.02, (count, seeds, 1))


def simulate(repetitions: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    coverage, wider = {}, {}
    for seeds, prompts in SIZES:
        for name, spread in SPREADS.items():
            key = f"{seeds} seeds, {prompts} prompts, {name}"
            drawn = tables(random, repetitions, seeds, prompts, spread)
            coverage[key] = float((abs(drawn.mean((1, 2))) <= half_widths(drawn)).mean())
            if prompts > 1:
                some = drawn[: repetitions // 4]
                wider[key] = float(np.mean([wider_covers(random, table) for table in some]))
    for seeds in (4, 8):
        drawn = real_tables(random, repetitions, seeds)
        coverage[f"{seeds} seeds, 32 prompts, real"] = float((abs(drawn.mean((1, 2))) <= half_widths(drawn)).mean())
    false = {}
    for case, (kind, effect, word) in FALSE.items():
        for name, spread in SPREADS.items():
            both = tables(random, repetitions, 8, 32, spread)
            found = procedure(kind, effect, both[:, :4], both)
            false[f"{case}, {name}"] = found.count(word) / repetitions
    return {"repetitions": repetitions, "coverage": coverage, "wider": wider, "false": false}


def summary() -> str:
    """Sentences on the recorded simulation."""
    found = json.loads(RESULTS.read_text())
    spans = {name: (min(found[name].values()), max(found[name].values())) for name in ("coverage", "wider", "false")}
    pooled = sum(found["coverage"].values()) / len(found["coverage"])
    return (
        f"Simulated with known effects ({found['repetitions']} tables for each of {len(found['coverage'])} cases:"
        f" `python -m benchmarks.claims.simulation`), intervals of 95% cover {spans['coverage'][0]:.1%} to"
        f" {spans['coverage'][1]:.1%} (mean {pooled:.1%}; the first plan {spans['wider'][0]:.1%} to"
        f" {spans['wider'][1]:.1%}), and the rule of verdicts, with its one extension, gives at most"
        f" {spans['false'][1]:.1%} false ones in a case."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = simulate(given.repetitions)
    rounded = {
        name: {key: round(value, 4) for key, value in one.items()} if isinstance(one, dict) else one
        for name, one in found.items()
    }
    given.results.write_text(json.dumps(rounded, indent=1) + "\n")
    for name in ("coverage", "wider", "false"):
        for key, value in found[name].items():
            print(f"{name:8} {value:.3f}  {key}")


if __name__ == "__main__":
    main()
