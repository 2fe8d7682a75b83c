"""Measures: numbers of one run, or of two that are compared at the same seed.

A run of a study has `evaluations`, pairs of a step and the mean reward of each held-out prompt, and `logs`, for each
metric its pairs of a step and a value. A run of a tiny model has `curves`, for each name a value for each step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Result = dict[str, Any]
REWARD = "reward"
RUNNING = 3
"""Logged steps whose rewards are averaged to say how well a run does."""


@dataclass(frozen=True)
class Score:
    """Mean reward of each held-out prompt: at the `last` evaluation, or over all (`auc`, area under the curve)."""

    of: str = "last"

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        own = self.scores(run)
        return list(own if other is None else own - self.scores(other))

    def scores(self, run: Result) -> np.ndarray:
        scores = np.array([rewards for _, rewards in run["evaluations"]])
        return scores[-1] if self.of == "last" else scores.mean(0)


@dataclass(frozen=True)
class PassAt:
    """Share of held-out prompts solved by the best of k of n completions, for each prompt: 1 - C(n-c, k) / C(n, k).

    c of n are right (rewards 0 and 1). Difference of two runs where two are given.
    """

    k: int
    n: int

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        own = self.shares(run)
        return list(own if other is None else own - self.shares(other))

    def shares(self, run: Result) -> np.ndarray:
        right = [round(mean * self.n) for mean in run["evaluations"][-1][1]]
        return np.array([1 - math.comb(self.n - c, self.k) / math.comb(self.n, self.k) for c in right])


@dataclass(frozen=True)
class HardestThird:
    """Last score of each prompt of the hardest third, by the scores of the first pilot; the difference of two runs.

    The samples that choose the prompts are those of neither run, and both are compared on the same prompts.
    """

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        start = Score().scores(pilots[0])
        hard = np.argsort(start, kind="stable")[: len(start) // 3]
        return list(np.array(Score()(run, other, []))[hard])


@dataclass(frozen=True)
class Logged:
    """Mean of a metric over the last `share` of a run; the difference of two runs, with `logit` of their log odds.

    Shares of 0 and 1 count as .005 and .995.
    """

    metric: str
    share: float = 0.25
    logit: bool = False

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        own = self.mean(run)
        return [own if other is None else own - self.mean(other)]

    def mean(self, run: Result) -> float:
        values = [value for _, value in run["logs"].get(self.metric, [])]
        late = values[len(values) - max(1, round(self.share * len(values))) :]
        mean = float(np.mean(late)) if late else math.nan
        if not self.logit:
            return mean
        mean = min(max(mean, 0.005), 0.995)
        return math.log(mean / (1 - mean))


@dataclass(frozen=True)
class AtEqualScore:
    """Difference of a metric between two runs at the same training reward, interpolated.

    The reward is the running mean over `RUNNING` steps, made monotone from the left (the best so far), and the level
    is the highest that both have reached. With `log` it is the difference of logarithms.
    """

    metric: str
    log: bool = False

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        assert other is not None, "two runs are compared"
        level = min(progress(run)[-1], progress(other)[-1])
        own, theirs = (self.at(one, level) for one in (run, other))
        return [math.log(max(own, 1e-12) / max(theirs, 1e-12)) if self.log else own - theirs]

    def at(self, run: Result, level: float) -> float:
        reached = progress(run)
        values = running(at_rewards(run, self.metric))
        step = next(number for number, reward in enumerate(reached) if reward >= level - 1e-12)
        if step == 0 or reached[step] == reached[step - 1]:
            return values[step]
        part = (level - reached[step - 1]) / (reached[step] - reached[step - 1])
        return values[step - 1] + part * (values[step] - values[step - 1])


@dataclass(frozen=True)
class Arrival:
    """Logarithm of the ratio of the cost at which two runs first reach 80% of the best pilot's last score.

    `cost` is "steps" or "tokens" (all that were sampled). Arrived is a run whose running mean of two evaluations is
    at that score; one that never is counts as one step, or one step's tokens, more than all.
    """

    cost: str = "steps"
    share: float = 0.8

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        assert other is not None, "two runs are compared"
        threshold = self.share * max(float(Score().scores(pilot).mean()) for pilot in pilots)
        return [math.log(self.of(run, threshold) / self.of(other, threshold))]

    def of(self, run: Result, threshold: float) -> float:
        means = [float(np.mean(rewards)) for _, rewards in run["evaluations"]]
        steps = [step for step, _ in run["evaluations"]]
        pairs = zip(steps[1:], means, means[1:], strict=False)
        arrived = next((step for step, before, now in pairs if (before + now) / 2 >= threshold), steps[-1] + 1)
        if self.cost == "steps":
            return arrived
        tokens = dict(run["logs"]["num_tokens"])
        last = max(tokens)
        return tokens[arrived] if arrived in tokens else tokens[last] * arrived / last


@dataclass(frozen=True)
class Growth:
    """Growth of a curve of a tiny model: mean of the last `window` steps less the first one.

    The last step is the last at which the running mean of `while_in[0]` is below `while_in[1]` in both runs, at least
    `window`.
    """

    curve: str
    window: int = 5
    while_in: tuple[str, float] | None = None

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        both = [run] if other is None else [run, other]
        end = min(self.end(one) for one in both)
        grown = [self.grown(one, end) for one in both]
        return [grown[0] - (grown[1] if other is not None else 0.0)]

    def end(self, run: Result) -> int:
        length = len(run["curves"][self.curve])
        if self.while_in is None:
            return length
        means = running(run["curves"][self.while_in[0]], self.window)
        beyond = [number for number, mean in enumerate(means) if mean > self.while_in[1]]
        return max(self.window, min([length, *beyond]))

    def grown(self, run: Result, end: int) -> float:
        values = run["curves"][self.curve]
        late = [value for value in values[end - self.window : end] if value is not None]
        first = next(value for value in values if value is not None)
        return float(np.mean(late)) - first if late else 0.0


@dataclass(frozen=True)
class Curve:
    """Mean of a curve of a tiny model over its last `window` steps; the difference of two runs."""

    curve: str
    window: int = 10

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        own = self.late(run)
        return [own if other is None else own - self.late(other)]

    def late(self, run: Result) -> float:
        return float(np.mean([value for value in run["curves"][self.curve][-self.window :] if value is not None]))


@dataclass(frozen=True)
class Reach:
    """Logarithm of the ratio of the steps at which a curve of two runs reaches 80% of the best pilot's end.

    Reached is a running mean over `window` steps; a run that never does counts as one step more than it has. `price`
    is what a step of the other run costs in steps of this one.
    """

    curve: str
    share: float = 0.8
    window: int = 5
    price: float = 1.0

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        assert other is not None, "two runs are compared"
        threshold = self.share * max(running(pilot["curves"][self.curve], self.window)[-1] for pilot in pilots)
        return [math.log(self.steps(run, threshold) / (self.price * self.steps(other, threshold)))]

    def steps(self, run: Result, threshold: float) -> int:
        means = running(run["curves"][self.curve], self.window)
        return next((number for number, mean in enumerate(means, 1) if mean >= threshold), len(means) + 1)


@dataclass(frozen=True)
class Fall:
    """Fall of a curve from its best running mean to its last, less `by`: above 0 is a run that has fallen."""

    curve: str
    by: float
    window: int = 10

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        means = running(run["curves"][self.curve], self.window)
        return [max(means) - means[-1] - self.by]


@dataclass(frozen=True)
class EntropyLaw:
    """Fit of R = -a e^H + b over a run (2505.22617): R² less the largest of .9, a line's in H and one's in the step."""

    least: float = 0.9

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        entropy = running(at_rewards(run, "entropy"))
        reward = running([value for _, value in run["logs"][REWARD]])
        law = explained(np.exp(entropy), reward)
        return [law - max(self.least, explained(entropy, reward), explained(np.arange(len(reward)), reward))]


@dataclass(frozen=True)
class Listed:
    """A list that a run has written down, such as a difference for each completion."""

    name: str

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        return list(run[self.name])


@dataclass(frozen=True)
class BestRate:
    """Logarithm to base 10 of the learning rate of a run; of the ratio of two."""

    name: str = "learning_rate"

    def __call__(self, run: Result, other: Result | None, pilots: Sequence[Result]) -> Sequence[float]:
        own = math.log10(run[self.name])
        return [own if other is None else own - math.log10(other[self.name])]


def running(values: Sequence[float], window: int = RUNNING) -> list[float]:
    """Mean of each value with up to `window - 1` before it."""
    return [float(np.mean(values[max(0, end - window) : end])) for end in range(1, len(values) + 1)]


def at_rewards(run: Result, metric: str) -> list[float]:
    """A metric at the steps that have a training reward: the first optimizer step on each rollout batch."""
    by_step = dict(run["logs"][metric])
    return [by_step[step] for step, _ in run["logs"][REWARD]]


def progress(run: Result) -> list[float]:
    """Best running mean of the training reward so far, at each logged step."""
    return list(np.maximum.accumulate(running([value for _, value in run["logs"][REWARD]])))


def explained(x: Any, y: Any) -> float:
    """Share of the variance of y that a line in x explains."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)
