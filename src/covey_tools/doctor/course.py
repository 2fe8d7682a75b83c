"""Course of a recorded run: a policy that was destroyed, completions that became one answer, a reward that died."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from torch import Tensor

from covey.core.advantages import nanstd
from covey.core.findings import Effect, Finding
from covey.core.likeness import answer_of, common_share, most_common, reference_of
from covey.core.records import FinishReason, PromptSample, Rollout, RolloutBatch
from covey.observability.diagnostics import RISEN, Course, collapsed, entropy_is_lost, lost
from covey_tools.doctor.examined import ExaminedRun
from covey_tools.doctor.learning import DIFFERING, MUCH, bonus_scale, decay, differing_routes, rate_within

MOST, LEAST = 12, 3  # rollout batches that are read, and without which there is no course
SMALL = 0.02  # nats a token in the first update, by which no policy is destroyed
SILENT = 0.95  # share of a role's rollouts without an advantage, from which on nothing is learnt in it
MOST_ASKED = 24  # prompts to which a constant answer is given


@dataclass(frozen=True)
class Point:
    """A rollout batch on record."""

    number: int
    step: int
    totals: Tensor  # [P, G]
    scored: RolloutBatch
    entropy: float | None  # nats a token
    grad_norm: float | None = None

    @property
    def mean(self) -> float:
        return self.totals.nanmean().item()

    @property
    def signal(self) -> bool:
        return bool((nanstd(self.totals, dim=1) > 0).any())

    @property
    def present(self) -> list[tuple[PromptSample, Rollout]]:
        """All rollouts but absent ones, with their samples."""
        return [pair for pair in zip(self.scored.samples, self.scored.rollouts, strict=True) if not pair[1].absent]

    @cached_property
    def answers(self) -> list[str | None]:  # of those present, like `prompts`
        return [None if one.finish is FinishReason.ERROR else answer_of(one.completion) for _, one in self.present]

    @property
    def prompts(self) -> list[str]:
        return [str(draw.row.get("prompt", draw.prompt)) for draw, _ in self.present]

    @property
    def references(self) -> list[str | None]:
        return [reference_of(draw.row) for draw in self.scored.samples]

    @property
    def log(self) -> dict[str, Any]:
        """Metrics of the batch by which a run judges its course."""
        equal = (nanstd(self.totals, dim=1)[:, 0].nan_to_num() == 0).double().mean().item()
        return {"step": self.step, "reward": self.mean, "frac_reward_zero_std": equal}


def findings(read: Any, run: ExaminedRun | None) -> Iterator[Finding]:
    """Findings of the record of a run; `run` makes experiments, where its parts can be made again."""
    points: Sequence[Point] = [one for one in read.points if one.mean == one.mean]
    yield from silent_roles(read.metrics)
    if not read.settings.get("routing_replay"):
        yield from other_experts(read.metrics)
    if len(points) < LEAST:
        return
    rate = read.settings.get("learning_rate", 1e-6)
    found = _destroyed(points, rate, run) or _one_answer(points, run) or _lost(points, read.args)
    if found is not None:
        yield found


def silent_roles(metrics: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Roles of which hardly any rollout has an advantage, in the metrics of a run."""
    names = dict.fromkeys(name for line in metrics for name in line if name.startswith("roles/"))
    shares = {
        name.split("/")[1]: [line[name] for line in metrics if name in line]
        for name in names
        if name.endswith("/advantage_zero")
    }
    silent = {
        role: fmean(values) for role, values in shares.items() if len(values) >= LEAST and fmean(values) >= SILENT
    }
    if silent:
        listed = ", ".join(f"{role!r} ({share:.0%})" for role, share in silent.items())
        yield Finding(
            "role-silent",
            "warning",
            f"rollouts without an advantage, by role: {listed}. Nothing is learnt from them.",
            "Look at roles/{role}/reward_std: where it is not 0, compare with more rollouts (compare='role' or"
            " 'role_average'); where it is, the role's reward is always the same.",
        )


def other_experts(metrics: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Experts in engine and trainer, as compared in the first rollout batches of a run."""
    shares = [line["routing/differing"] for line in metrics if line.get("routing/differing") is not None]
    if shares and max(shares) >= DIFFERING:
        yield differing_routes(max(shares))


def thirds(points: Sequence[Point]) -> tuple[Sequence[Point], Sequence[Point]]:
    third = max(1, len(points) // 3)
    return points[:third], points[-third:]


def rose(points: Sequence[Point]) -> bool:
    """True if the reward rose from the first to the last third by more than chance and a tenth of its range."""
    points = [one for one in points if one.mean == one.mean]
    if len(points) < LEAST:
        return False
    sides = []
    for side in thirds(points):
        values = [value for point in side for value in point.totals.flatten().tolist() if value == value]
        sides.append((fmean(values), _variance(values) / len(values)))
    (first, before), (last, after) = sides
    every = [value for point in points for value in point.totals.flatten().tolist() if value == value]
    return last - first > max(2 * (before + after) ** 0.5, RISEN * (max(every) - min(every))) > 0


def fell(begin: Sequence[Point], end: Sequence[Point]) -> bool:
    """True if the mean reward of groups fell by more than chance."""
    first, last = (_groups(side) for side in (begin, end))
    error = (_variance(first) / len(first) + _variance(last) / len(last)) ** 0.5
    return fmean(first) - fmean(last) > max(2 * error, 1e-9)


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def _destroyed(points: Sequence[Point], rate: float, run: ExaminedRun | None) -> Finding | None:
    """A reward that fell by more than chance, with an entropy that vanished or exploded, or after huge updates."""
    begin, end = thirds(points)
    if not fell(begin, end) or rose(points):
        return None
    first, last = (_groups(side) for side in (begin, end))
    entropies = [[point.entropy for point in side if point.entropy is not None] for side in (begin[:1], end)]
    before, after = (fmean(side) if side else float("nan") for side in entropies)
    broken = entropy_is_lost(before, after) or after > 3 * before + 1
    pulls = () if run is None else (*decay(run), *bonus_scale(run))  # which no learning rate makes good
    for other in pulls:
        if other.supported is other:
            return replace(
                other, evidence=f"the mean reward fell from {fmean(first):.3g} to {fmean(last):.3g}: {other.evidence}"
            )
    trial = rate_within(run, rate) if run is not None and run.has_time("learning-rate-high") else None
    if trial is not None and trial[1].finite and trial[1].moved < SMALL:
        return None
    huge = trial is not None and not (trial[1].finite and trial[1].moved < MUCH)
    if not (broken or huge):
        return None
    means = [point.mean for point in points]
    worst = min(range(1, len(points)), key=lambda n: means[n] - means[n - 1])
    norms = [point.grad_norm for point in points if point.grad_norm is not None]
    shown = f", and gradient norms of up to {max(norms):.3g}" if norms else ""
    evidence = (
        f"from the first to the last rollout batches the mean reward went from {fmean(first):.3g} to"
        f" {fmean(last):.3g} and the entropy from {before:.2g} to {after:.2g} nats, at learning_rate={rate:g}{shown}."
    )
    most = f"The reward fell most before step {points[worst].step}, from {means[worst - 1]:.3g} to {means[worst]:.3g}."
    advice = "Lower learning_rate: a tenth of it is a first guess."
    if trial is None or trial[0] >= rate:
        return Finding("learning-rate-high", "error", evidence, advice, most)
    better, high, low = trial
    return Finding(
        "learning-rate-high",
        "error",
        evidence,
        f"Set learning_rate={better:g}.",
        f"{most} A first update at learning_rate={rate:g} changes log-probs by {high.moved:.2g} nats a token, and at"
        f" {better:g} by {low.moved:.2g}.",
        Effect(high.moved if high.finite else float("inf"), low.moved, higher_is_better=False),
        otherwise=advice,
    )


def _groups(points: Sequence[Point]) -> list[float]:
    """Mean reward of each group that has one."""
    return [value for point in points for value in point.totals.nanmean(1).tolist() if value == value]


def _one_answer(points: Sequence[Point], run: ExaminedRun | None) -> Finding | None:
    """One answer to all prompts at the end, where there were others at the beginning and should be."""
    begin, end = thirds(points)
    answers, prompts, references = ([one for p in end for one in getattr(p, n)] for n in _COLUMNS)
    if len(set(prompts)) < 3:
        return None
    share = common_share(answers, prompts)
    known = [one for one in references if one is not None]
    right = most_common(references)[1] if len(known) == len(references) else 0.0
    started = common_share([one for p in begin for one in p.answers], [one for p in begin for one in p.prompts])
    if not collapsed(started, share, right):
        return None
    answer = most_common(answers)[0]
    mean, best = (
        fmean(point.mean for point in end),
        max(point.totals.nan_to_num(-1e30).max().item() for point in points),
    )
    satisfied = mean >= best - 0.05 * abs(best)  # by the constant answer, so that it is what the reward asks for
    if satisfied and not known:
        return None  # and rows without right answers may all be answered alike
    of_rows = f" The rows have {len(set(known))} different right answers." if known else ""
    evidence = (
        f"{share:.0%} of the completions of the last rollout batches are {answer[:60]!r}, to {len(set(prompts))}"
        f" different prompts; at the beginning the most common answer had {started:.0%}.{of_rows} The mean reward is"
        f" {mean:.3g}, and the highest of any completion was {best:.3g}."
    )
    return Finding(
        "collapse",
        "error" if known and not satisfied else "warning",
        evidence,
        "Change the reward so that no constant answer is paid (no points for form alone, rarer right answers counting"
        " as much as common ones), use more and balanced rows, and lower learning_rate or add a KL penalty (beta).",
        _constant(points, run, answer) if run is not None else "",
    )


_COLUMNS = ("answers", "prompts", "references")


def _constant(points: Sequence[Point], run: ExaminedRun, answer: str) -> str:
    """Rewards of the constant answer, given to every prompt."""
    if not run.rescores or not run.has_time("collapse"):
        return ""
    written = next(
        one.completion
        for point in reversed(points)
        for (_, one), said in zip(point.present, point.answers, strict=True)
        if said == answer
    )
    text = written if isinstance(written, str) else str(written[-1].get("content") or "") if written else ""
    asked: list[PromptSample] = [draw for point in points for draw in point.scored.samples[:: point.totals.shape[1]]]
    asked = asked[:: max(1, len(asked) // MOST_ASKED)]
    totals = run.totals([one.row for one in asked], [run.answering(one.row, text) for one in asked])
    first = points[0].mean
    return (
        f"Given as the answer to each of {len(asked)} prompts on record, {text[:60]!r} gets {totals.nanmean():.3g} on"
        f" average; the untrained policy got {first:.3g}."
    )


def _lost(points: Sequence[Point], args: Any) -> Finding | None:
    """All rewards equal at the end and as low as any, after groups had a signal and rewards were higher."""
    begin, end = thirds(points)
    means = [point.mean for point in points]
    peak, lowest = max(range(len(points)), key=lambda n: means[n]), means[-1]
    course = Course(len(begin), len(end))
    for point in points:
        course.add(point.log, args)
    if len(end) < 2 or not lost(course) or not fell(begin, end):
        return None
    rows = [{draw.prompt for point in side for draw in point.scored.samples} for side in (begin, end)]
    evidence = (
        f"the mean reward was {means[peak]:.3g} at step {points[peak].step}, and all completions of the last rollout"
        f" batches, from step {end[0].step} on, get {lowest:g}."
    )
    if args.shuffle_dataset is False and not rows[0] & rows[1]:
        fix = "Set shuffle_dataset=True: the last rows of the dataset are harder than the first."
        return Finding("reward-lost", "error", evidence, fix, "No row of the first batches comes again in the last.")
    return Finding(
        "reward-lost",
        "error",
        evidence,
        "Read the completions of the steps where it fell (`covey view`): the policy has left what the reward reads."
        " Lower learning_rate or add a KL penalty (beta); or the function depends on something that has changed.",
        f"It was higher in {sum(mean > lowest for mean in means)} of {len(points)} rollout batches that were read.",
    )
