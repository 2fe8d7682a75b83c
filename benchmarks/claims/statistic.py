"""Intervals of paired differences over seeds and prompts, and the verdicts that they give.

A table `differences[S, P]` holds the difference of two arms at each of S seeds and P prompts. Seeds and prompts are
both samples: another seed and other prompts would have given another table. The interval of its mean is

    D ± t(ν) · √V,    V = (M_seed + M_prompt - M_rest) / (S P),

M the mean squares of a two-way table without repetition, and ν the degrees of freedom of Satterthwaite (1946), as in
the quasi-F test of Clark (1973, "The language-as-fixed-effect fallacy"). The sum of mean squares is at least `FLOOR`
· M_rest, then with the degrees of freedom of M_rest, (S - 1)(P - 1). With one number a seed (P = 1) this is Student's
t over seeds.

`python -m benchmarks.claims.simulation` shows its coverage, and why the first plan was not kept: the wider one of a
two-level bootstrap and Student's t over the means of seeds covers more than 99% in place of 95% where the noise of
single cells is large, since the bootstrap counts it three times (Owen 2007, "The pigeonhole bootstrap").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LEVEL, TWO_LOOKS = 0.95, 0.975
"""Confidence of an interval, and of each of the two where a claim was extended: together they err in at most 5%."""
FLOOR = 0.7
"""Smallest sum of mean squares, in mean squares of the rest: noise alone gives 1 on average. Chosen by simulation, in
which the worst case covers 97.3% with 1 and 92.7% with 0."""
HOLDS, FAILS, OPEN = "holds", "does not hold here", "undecided"

Kind = Literal["superiority", "non-inferiority", "equivalence", "difference"]


@dataclass(frozen=True)
class Interval:
    """Mean difference with its interval."""

    mean: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def crossed(differences: np.ndarray, level: float = LEVEL) -> Interval:
    """Interval of the mean of `differences[S, P]`, S seeds (at least 2) and P prompts, both samples."""
    table = np.asarray(differences, dtype=float)
    seeds = len(table)
    if seeds < 2:
        raise ValueError(f"an interval over seeds needs 2 seeds or more, and {seeds} is given")
    mean = float(table.mean())
    variance, freedom = variance_of_mean(table[None])
    half = student_t(level, float(freedom[0])) * math.sqrt(variance[0])
    return Interval(mean, mean - half, mean + half, level)


def variance_of_mean(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance V of the mean of each of `tables[N, S, P]`, and its degrees of freedom, both [N]."""
    _, S, P = tables.shape
    by_seed, by_prompt = tables.mean(2), tables.mean(1)
    if P == 1:
        return by_seed.var(1, ddof=1) / S, np.full(len(tables), S - 1.0)
    rest = tables - by_seed[:, :, None] - by_prompt[:, None] + tables.mean((1, 2))[:, None, None]
    m_seed, m_prompt = P * by_seed.var(1, ddof=1), S * by_prompt.var(1, ddof=1)
    m_rest = (rest**2).sum((1, 2)) / ((S - 1) * (P - 1))
    total, least = m_seed + m_prompt - m_rest, FLOOR * m_rest
    spread = m_seed**2 / (S - 1) + m_prompt**2 / (P - 1) + m_rest**2 / ((S - 1) * (P - 1))
    freedom = np.divide(total**2, spread, out=np.full(len(tables), S - 1.0), where=spread > 0)
    freedom = np.where(total < least, (S - 1.0) * (P - 1), np.maximum(freedom, 1.0))
    return np.maximum(total, least) / (S * P), freedom


def ratio_of_means(over: np.ndarray, under: np.ndarray, level: float = LEVEL, resamples: int = 10_000) -> Interval:
    """Interval of log(mean(over) / mean(under)) for pairs [N], by a percentile bootstrap over the pairs."""
    over, under = np.asarray(over, dtype=float), np.asarray(under, dtype=float)
    random = np.random.default_rng(0)
    drawn = random.integers(len(over), size=(resamples, len(over)))
    logs = np.log(over[drawn].mean(1) / under[drawn].mean(1))
    low, high = np.quantile(logs, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.log(over.mean() / under.mean())), float(low), float(high), level)


def median(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Median with the narrowest interval of order statistics that covers it with `level`, infinite if there is none.

    For values of which some are only known to lie beyond a bound, such as steps of a run that never arrived. Four seeds
    have no such interval (their range covers 87.5%), six have one of 95%, seven of 97.5%.
    """
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0  # chance that fewer than `cut` of the values lie below the median
    cut = -1
    for number in range(count // 2):
        below += math.comb(count, number) / 2**count
        if 1 - 2 * below < level:
            break
        cut = number
    low, high = (ordered[cut], ordered[count - 1 - cut]) if cut >= 0 else (-math.inf, math.inf)
    return Interval(float(np.median(ordered)), low, high, level)


def verdict(kind: Kind, interval: Interval, delta: float) -> str:
    """One of three words, by an interval and the smallest difference that is called an effect.

    | kind | holds | does not hold here |
    |---|---|---|
    | superiority, D > 0 | interval above 0 | below delta |
    | non-inferiority, D > -delta | interval above -delta | mean below -delta, and interval below 0 |
    | equivalence, -delta < D < delta | interval within | mean beyond, and interval on one side of 0 |
    | difference, D ≠ 0 | interval on one side of 0 | interval within -delta and delta |

    Superiority that is also below delta holds, "smaller than delta": the page says so.
    """
    low, high, mean = interval.low, interval.high, interval.mean
    if kind == "superiority":
        return HOLDS if low > 0 else FAILS if high < delta or high < 0 else OPEN
    if kind == "non-inferiority":
        return HOLDS if low > -delta else FAILS if high < 0 and mean < -delta else OPEN
    within, beside_zero = -delta < low and high < delta, low > 0 or high < 0
    if kind == "difference":
        return HOLDS if beside_zero else FAILS if within else OPEN
    if within:
        return HOLDS
    return FAILS if abs(mean) > delta and beside_zero else OPEN


def fisher(more: int, fewer: int, seeds: int) -> float:
    """One-sided p of `more` against `fewer` of `seeds` each, by Fisher's exact test.

    Example:
        >>> round(fisher(4, 0, 4), 4)
        0.0143
    """
    both = more + fewer
    ways = [math.comb(seeds, k) * math.comb(seeds, both - k) for k in range(more, min(seeds, both) + 1)]
    return sum(ways) / math.comb(2 * seeds, both)


def weakest(verdicts: Sequence[str]) -> str:
    """Verdict of a claim in several parts: one that fails decides, then one that is open."""
    return next((word for word in (FAILS, OPEN) if word in verdicts), HOLDS) if verdicts else OPEN


def seeds_to_decide(kind: Kind, interval: Interval, delta: float, seeds: int) -> int | None:
    """Seeds with which the interval would decide if mean and spread stayed the same; None for more than 200.

    The half width is taken to shrink with √seeds and with Student's t.
    """
    if not math.isfinite(interval.half) or seeds < 2:
        return None
    scale = interval.half * math.sqrt(seeds) / student_t(interval.level, seeds - 1)
    for count in range(seeds + 1, 201):
        half = scale * student_t(interval.level, count - 1) / math.sqrt(count)
        if verdict(kind, Interval(interval.mean, interval.mean - half, interval.mean + half), delta) != OPEN:
            return count
    return None


def student_t(level: float, freedom: float) -> float:
    """Two-sided quantile of Student's t: the value that |t| stays below with probability `level`.

    Example:
        >>> round(student_t(0.95, 3), 3), round(student_t(0.95, 1e9), 3)
        (3.182, 1.96)
    """
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        # P(|t| > x) is the incomplete beta function I of freedom / (freedom + x²) with parameters freedom/2 and 1/2
        outside = incomplete_beta(freedom / (freedom + middle * middle), freedom / 2, 0.5)
        low, high = (middle, high) if outside > 1 - level else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    ) / a  # fmt: skip
    # modified Lentz algorithm
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / (1 + even * d), 1 + even / c
        value *= c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / (1 + odd * d), 1 + odd / c
        value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value
