"""Evaluation estimates from n samples of each of P prompts: pass@k, maj@k and confidence intervals."""

import math
import statistics
from collections.abc import Hashable, Sequence
from fractions import Fraction

Z95 = statistics.NormalDist().inv_cdf(0.975)  # standard deviations to each side that hold 95% of a normal distribution


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374, eq. 1), for n samples, c of them right. ValueError if k is not between 1 and n.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
        (0.25, 0.5, 1.0)
    """
    _check(samples, k)
    return float(1 - Fraction(math.comb(samples - right, k), math.comb(samples, k)))


def maj_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the probability that the most frequent answer among k samples is right.

    Voting is self-consistency (arXiv 2203.11171). The estimate is the average over all subsets of k of the n samples (a
    U-statistic, Hoeffding 1948), counted exactly. Ties are broken at random. A sample whose answer is None does not
    vote, and a subset in which all answers are None is wrong. If samples of one answer differ in `right`, the answer
    counts as right by the fraction that is. ValueError if k is not between 1 and n.

    Example:
        Of the three pairs of these samples, one is (7, 7), which is right, and two are ties of 7 and 8.

        >>> maj_at_k([7, 7, 8], [True, True, False], 2)
        0.6666666666666666
    """
    _check(len(answers), k)
    votes: dict[Hashable, list[bool]] = {}
    for answer, one in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(one)
    sizes = [len(group) for group in votes.values()]
    silent = len(answers) - sum(sizes)
    wins = {}
    for size in set(sizes):
        others = sizes.copy()
        others.remove(size)
        wins[size] = _ways_to_win(size, others, silent, k)
    total = sum((wins[len(group)] * Fraction(sum(group), len(group)) for group in votes.values()), Fraction(0))
    return float(total / math.comb(len(answers), k))


def _ways_to_win(size: int, others: list[int], silent: int, k: int) -> Fraction:
    """Subsets of k in which an answer with `size` samples is the most frequent; one with a tie of t counts 1 / t."""
    ways = Fraction(0)
    for votes in range(1, min(size, k) + 1):
        rest = k - votes
        # (samples chosen so far, answers with as many votes) -> ways to choose from the other answers with at least as
        # many samples, none of which gets more votes
        table = {(0, 0): 1}
        for other in others:
            if other < votes:
                continue
            grown: dict[tuple[int, int], int] = {}
            for (chosen, ties), count in table.items():
                for more in range(min(votes, rest - chosen) + 1):
                    state = chosen + more, ties + (more == votes)
                    grown[state] = grown.get(state, 0) + count * math.comb(other, more)
            table = grown
        # any choice among these leaves the answer ahead
        free = silent + sum(other for other in others if other < votes)
        for (chosen, ties), count in table.items():
            ways += Fraction(math.comb(size, votes) * count * math.comb(free, rest - chosen), ties + 1)
    return ways


def interval_of_share(values: Sequence[float], draws: int = 1, z: float = Z95) -> tuple[float, float]:
    """Confidence interval for the mean of values between 0 and 1, one per prompt: its lower and its upper end.

    Wilson's score interval (Wilson 1927) at the effective number of trials p (1 - p) / var(mean) (Korn and Graubard
    1998), which is the number of prompts if every value is 0 or 1.

    Args:
        values: one per prompt, at least one.
        draws: independent trials behind each value, which bound the effective number: n / k for an average over all
            subsets of k of n samples.
        z: standard deviations to each side.

    Example:
        >>> [round(end, 3) for end in interval_of_share([1.0] * 8 + [0.0] * 2)]
        [0.49, 0.943]
    """
    count, mean = len(values), statistics.fmean(values)
    variance = statistics.fmean([(value - mean) ** 2 for value in values])
    most = mean * (1 - mean)
    trials = float(count)
    if most > 0:
        trials = count * draws if variance * draws <= most else count * most / variance
    middle = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = z / (1 + z * z / trials) * math.sqrt(most / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - spread), min(1.0, middle + spread)


def interval_of_mean(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """Confidence interval for the mean of numbers, one per prompt (at least two): z standard errors to each side."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return mean - z * error, mean + z * error


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be between 1 and the number of samples, {samples}.")
