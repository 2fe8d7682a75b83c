"""Rewards as numbers: their scale, sign and dependence on length, and how many groups have a signal."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import EPSILON, centred, nanstd
from covey.core.findings import Effect, Finding
from covey.rewards.text import completion_text
from covey_tools.doctor.examined import PROMPTS, SAMPLES, ExaminedRun, SampleBatch
from covey_tools.doctor.reward_texts import FORMS, in_forms, right_answer

LENGTH_ALONE = 0.95  # correlation with the reward of filler: less than a tenth of the variance is left to content


def cancelling(base: SampleBatch, names: Sequence[str]) -> Finding | None:
    """Functions that differ within groups, and whose weighted sum does not."""
    weighted = base.rewards.double().view(base.prompts, base.size, -1) * base.weights.double()  # [P, G, F]
    deviations = nanstd(weighted, dim=1)[:, 0].nanmean(0)  # [F]
    loudest = deviations.argsort(descending=True)[:2].tolist()
    if len(loudest) < 2 or deviations[loudest[1]] < 1e-9 or base.spread.nanmean() > 1e-6 * deviations[loudest[0]]:
        return None
    one, other = (names[index] for index in loudest)
    against = group_correlation(weighted[..., loudest[0]], weighted[..., loudest[1]])
    return Finding(
        "reward-constant",
        "error",
        f"{one} and {other} cancel each other: each differs within groups, by {deviations[loudest[0]]:.3g}"
        f" (standard deviation, weighted), and the sum of all functions is {base.mean:.3g} for every completion.",
        f"Remove {one} or {other}, or give them other reward_weights: what the one pays the other takes.",
        f"Within groups the correlation of the two is {against:.2f}.",
    )


def small(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards so close together that the constant added to their deviation, or no scaling, leaves no advantage."""
    base, scaled = run.base, str(run.args.scale_rewards)
    deviations = base.spread[base.spread > 0]
    if not len(deviations) or run.args.method != "grpo" or run.args.advantages is not None:
        return
    if cancelling(base, run.suite.names) is not None:  # what is left is rounding
        return
    one = deviations.median().item()
    left = one if scaled == "none" else one / (one + EPSILON)
    if left > (1e-3 if scaled == "none" else 0.5):
        return
    factor = float(f"{1 / one:.0e}")
    weights = [float(f"{weight * factor:.3g}") for weight in base.weights.tolist()]
    then = min(one * factor, 1.0) if scaled == "none" else one * factor / (one * factor + EPSILON)
    yield Finding(
        "reward-scale",
        "warning",
        f"rewards of a group differ by {one:.2g} (standard deviation), so that advantages are about {left:.2g}"
        + (" (scale_rewards='none')." if scaled == "none" else f": {EPSILON:g} is added to what they are divided by."),
        f"Set reward_weights={weights}.",
        f"With these weights advantages of the same completions are about {then:.2g}.",
        Effect(left, then),
    )


def scale(run: ExaminedRun) -> Iterator[Finding]:
    """Advantages that follow one function where another one has something to say, too."""
    base, names, aggregated = run.base, run.suite.names, run.args.multi_objective_aggregation
    if len(names) < 2 or (aggregated == "normalize_then_sum" and run.args.method == "grpo"):
        return
    grouped = base.rewards.double().view(base.prompts, base.size, -1) * base.weights.double()  # [P, G, F]
    deviations = nanstd(grouped, dim=1)[:, 0]  # [P, F]
    for loud, faint in permutations(range(len(names)), 2):
        both = (deviations[:, loud] > 1e-9) & (deviations[:, faint] > 1e-9)
        if both.double().mean() < 0.15:
            continue
        ratio = (deviations[both, loud] / deviations[both, faint]).median().item()
        follows = [group_correlation(base.totals[both], grouped[both][..., index]) for index in (loud, faint)]
        if ratio < 8 or follows[0] < 0.97 or follows[1] > 0.6:
            continue
        even = (grouped / deviations.nanmean(0).clamp(min=1e-9)).nansum(-1)
        now = group_correlation(even[both], grouped[both][..., faint])
        weights = base.weights.tolist()
        means = (deviations / base.weights).nanmean(0).tolist()  # a function without differences keeps its weight
        given = [float(f"{1 / d:.3g}") if d > 1e-30 else weight for d, weight in zip(means, weights, strict=True)]
        chosen = weights[faint] < 1 and weights[loud] <= 1  # on purpose
        yield Finding(
            "reward-scale",
            "note" if chosen else "error",
            f"{names[loud]} differs {ratio:.0f} times as much within groups as {names[faint]}: advantages follow it"
            f" alone (correlation {follows[0]:.2f}, and {follows[1]:.2f} with {names[faint]}).",
            f"Set reward_weights={given}, or multi_objective_aggregation=normalize_then_sum.",
            f"With these weights the correlation of advantages with {names[faint]} goes from {follows[1]:.2f} to"
            f" {now:.2f}.",
            Effect(follows[1], now),
        )
        return


def group_correlation(totals: Tensor, values: Tensor) -> float:
    """Pearson's correlation of two tensors [P, G] after each group's mean is taken off."""
    one, two = centred(totals).nan_to_num().flatten(), centred(values).nan_to_num().flatten()
    return (one @ two / (one.norm() * two.norm()).clamp(min=1e-12)).item()


def sign(run: ExaminedRun) -> Iterator[Finding]:
    """Right answers that get less than other rows' answers, in the same words."""
    shown = [one for one in turned(run) if one]
    if not shown:
        return
    weights = run.weights.tolist()
    negative = [name for name, weight in zip(run.suite.names, weights, strict=True) if weight < 0]
    fix = (
        f"Set reward_weights={[abs(weight) for weight in weights]}: the weight of {' and '.join(negative)} is negative."
        if negative
        else "Turn the reward's sign: a higher reward is a better one."
    )
    yield Finding(
        "reward-sign",
        "warning",
        f"wrong answers get more than right ones: {shown[0]}.",
        fix,
        f"So it is for {len(shown)} of {min(run.base.prompts, 4)} prompts, and the reverse for none.",
    )


def turned(run: ExaminedRun) -> list[str]:
    """For a few prompts, the words in which a wrong answer gets more than the right one; nothing if any gets less."""
    if not run.rescores or not len(run.base.known):
        return []
    shown: list[str] = []
    rows = [sample.row for sample in run.base.samples[:: run.base.size]]
    answers = [right_answer(row) for row in rows]
    for row, own in zip(rows[:4], answers, strict=False):
        wrong = next((one for one in answers if one is not None and one != own), None)
        if own is None or wrong is None:
            continue
        texts = [*in_forms(own), *in_forms(wrong)]
        kept = run.failure
        totals = run.totals([row] * len(texts), [run.answering(row, text) for text in texts]).view(2, -1)
        run.failure = kept
        differs = ((totals[0] - totals[1]).abs() > 1e-12).nonzero().flatten().tolist()
        lower = [place for place in differs if totals[0, place] < totals[1, place]]
        worst = 0 in lower and bool(totals[0, 0] <= totals.nan_to_num(math.inf).min())  # 0: the answer and nothing else
        if len(differs) > len(lower) and not worst:
            return []
        if lower:
            first = lower[0]
            shown.append(
                f"{texts[first][:60]!r} gets {totals[0, first]:.3g} and {texts[first + len(FORMS)][:60]!r}"
                f" {totals[1, first]:.3g}, where {own[:40]!r} is right"
            )
    return shown if len(shown) > 1 else []


def length(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards that another text gets as well: one of as many words and of the same length, but without content."""
    found = paid_for_length(run, run.base) or _repeats(run)
    if found is not None:
        yield found


def paid_for_length(run: ExaminedRun, batch: SampleBatch) -> Finding | None:
    """The finding that rewards of these completions follow their length, whatever they say."""
    if not batch.spread.any() or not run.rescores:
        return None
    lengths = torch.tensor([len(completion_text(one.completion)) for one in batch.rollouts]).double()
    correlation = group_correlation(batch.totals, lengths.view_as(batch.totals))
    if abs(correlation) < 0.8:
        return None
    texts = [completion_text(one.completion) for one in batch.rollouts]
    filled, blocks = (_filler(run, batch, [re.sub(kind, "a", text) for text in texts]) for kind in (r"\w", r"\S"))
    explains = group_correlation(filled, batch.totals)
    if (
        explains < LENGTH_ALONE or abs(group_correlation(blocks, batch.totals)) < 0.5
    ):  # the second: it is for marks, not length
        return None
    return Finding(
        "reward-length",
        "warning",
        f"within groups the reward follows the length of completions (correlation {correlation:.2f}).",
        "Add a reward for content that weighs more, or remove the length from the reward if that is not the aim.",
        f"With every letter and digit replaced by 'a' rewards are the same but for {max(1 - explains**2, 0):.0%} of"
        " what differs within groups.",
    )


def _filler(run: ExaminedRun, batch: SampleBatch, texts: Sequence[str]) -> Tensor:
    """Rewards [P, G] of other texts in the place of completions, with as many tokens as these."""
    filled = []
    for sample, rollout, text in zip(batch.samples, batch.rollouts, texts, strict=True):
        tokens = len(rollout.completion_ids)
        other = run.answering(sample.row, text)
        other.completion_ids = (other.completion_ids * (tokens // max(len(other.completion_ids), 1) + 1))[:tokens]
        other.sampled = [True] * len(other.completion_ids)
        filled.append(other)
    return run.totals([sample.row for sample in batch.samples], filled).view_as(batch.totals)


def _repeats(run: ExaminedRun) -> Finding | None:
    """Good completions, written once, twice and three times."""
    base = run.base
    if not run.rescores or run.needs_calls or not base.spread.any() or not run.has_time("reward-repeats"):
        return None
    best = [  # of each prompt with a signal
        group * base.size + int(totals.nan_to_num(-math.inf).argmax())
        for group, totals in enumerate(base.totals)
        if base.spread[group] > 0
    ]
    rows = [base.samples[place].row for place in best]
    said = [completion_text(base.rollouts[place].completion).strip() for place in best]
    paid = [
        run.totals(rows, [run.answering(row, " ".join([text] * times)) for row, text in zip(rows, said, strict=True)])
        for times in (1, 2, 3)
    ]
    rises = (paid[1] > paid[0] + 1e-9) & (paid[2] > paid[1] + 1e-9)
    if int(rises.sum()) < max(2, 0.7 * len(best)):
        return None
    shown = int(rises.nonzero()[0])
    return Finding(
        "reward-repeats",
        "warning",
        f"a completion gets more the more often it says the same: {said[shown][:60]!r} gets"
        f" {paid[0][shown]:.3g}, twice {paid[1][shown]:.3g}, and three times {paid[2][shown]:.3g}. Repeating without"
        " end is what pays most.",
        "Count what is right once (`in` instead of `count`), or take off for what is too much.",
        f"So it is for the best completions of {int(rises.sum())} of {len(best)} prompts.",
    )


def signal(run: ExaminedRun) -> Iterator[Finding]:
    """Share of groups with a signal, now and with other group sizes."""
    base, group = run.base, run.group
    if not base.spread.any() or run.args.dynamic_sample or run.args.advantages == "reinforce_plus_plus":
        return  # the last has the batch as its baseline
    if run.args.compare != "group":
        return  # rewards of the seats of a game differ without any signal
    if base.size < SAMPLES and hasattr(run, "sample"):
        base = run.sample(PROMPTS, SAMPLES, max_tokens=base.limit)
    now, more = base.signal(group), base.signal(8)
    size = next((size for size in (8, 16, 32) if base.signal(size) > 0.75 * base.signal(64)), 32)
    better = base.signal(size)
    rates = f"{int((base.spread > 0).sum())} of {base.prompts} prompts got different rewards among {base.size} samples"
    if group < 4 and more > 1.5 * now and more - now > 0.15:
        yield Finding(
            "groups-small",
            "warning",
            f"with num_generations={group} about {now:.0%} of the groups have a signal; {rates}.",
            f"Set num_generations={size}.",
            f"In groups of {size} of the same samples {better:.0%} would have one, and a baseline of {size - 1} others"
            f" has {(1 + 1 / (size - 1)) / (1 + 1 / max(group - 1, 1)):.2f} times the variance.",
            Effect(now, better),
        )
    elif now < 0.3:
        larger = max(size, 2 * group)
        then = base.signal(larger)
        prompts = "Set dynamic_sample=True (or prompt_sampler=difficulty), or take prompts of medium difficulty"
        yield Finding(
            "signal-sparse",
            "error" if now < 0.05 else "warning",
            f"about {now:.0%} of the groups have a signal; {rates}.",
            f"{prompts}, or set num_generations={larger}.",
            f"With {larger} samples of each, {then:.0%} of the same prompts would have a signal.",
            Effect(now, then - 0.02),
            otherwise=f"{prompts}: larger groups of these prompts would not have one more often.",
        )


def summary_of(run: ExaminedRun) -> dict[str, Any]:
    base = run.base
    of_batch = run.args.advantages == "reinforce_plus_plus"  # which compares with all prompts
    figures = {
        "signal": len(set(base.known.tolist())) > 1 if of_batch else bool(base.spread.nan_to_num().any()),
        "completions": len(base.present),
        "prompts": base.prompts,
        "reward": None if not len(base.known) else round(base.mean, 6),
        "groups_with_signal": round(sum((base.spread > 0).double().tolist()) / max(base.prompts, 1), 4),
        "groups_with_signal_expected": round(base.signal(run.group), 4),
        "cut": round(base.cut, 4),
        "seconds_of_sampling": round(base.seconds, 2),
    }
    if run.suite.abstains:  # every token has the teacher's signal, and groups have none
        figures |= {"signal": True, "groups_with_signal": None, "groups_with_signal_expected": None}
    elif run.args.compare != "group":
        figures |= {"groups_with_signal": None, "groups_with_signal_expected": None}
    return figures
