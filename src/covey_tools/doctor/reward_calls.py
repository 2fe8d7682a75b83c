"""Rewards as functions: called again, in another order and in parts, which shows what they depend on."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import weighted_total
from covey.core.findings import Effect, Finding
from covey.core.records import FinishReason
from covey.rewards.contract import MissingArgument
from covey.rewards.text import completion_text
from covey.rollout.prompts import is_conversational
from covey_tools.doctor.examined import ExaminedRun
from covey_tools.doctor.reward_texts import MOST_FURTHER, right_answer
from covey_tools.doctor.reward_values import group_correlation

NOISY = 0.5  # share of the differences within groups from which on most of what is learnt is chance
MOST_CALLED, QUICK = 20_000, 0.05  # completions that a function is called with for its memory alone; seconds of a call


def failing(run: ExaminedRun) -> Iterator[Finding]:
    """Functions that raise, return nonsense or abstain on most completions."""
    base, error = run.base, run.failure
    if error is not None:
        if isinstance(error, MissingArgument):
            yield Finding("data-columns", "error", str(error), "Rename the column (`columns`), or the argument.")
            return
        evidence = str(error).partition(" First sample:")[0]
        if isinstance(error.__cause__, TimeoutError):
            yield _late(run, evidence)
        else:
            yield Finding("reward-failing", "error", evidence, *_other_form(run))
        return
    explained, count = False, len(base.present)
    there = [not one.absent for one in base.rollouts]
    for index, name in enumerate(run.suite.names):
        failures, late = (int(base.stats[f"rewards/{name}/{kind}"].value()) for kind in ("failures", "timeouts"))
        missing = int(base.rewards[there, index].isnan().sum()) - failures - late
        if late > count / 4:
            yield _late(run, f"{name} has not scored {late} of {count} completions within {run.suite.timeout:g} s.")
        elif failures > count / 10:
            level = "error" if failures > count / 2 else "warning"
            evidence = f"{name} raises or returns no number for {failures} of {count} completions."
            yield Finding("reward-failing", level, evidence, *_other_form(run))
        elif missing == count:
            if _scores_other_rows(run, index):
                continue
            yield Finding(
                "reward-failing",
                "error" if len(run.suite.names) == 1 else "warning",
                f"{name} returns None, no reward, for all of {count} completions.",
                "Let it return a number for what it should judge; None is for rows that are not its own.",
                f"Called again, one at a time, it returns None for all of {count}.",
            )
        else:
            continue
        explained = True
    if not explained and (silent := _silent_about_wrong(run)) is not None:
        yield silent
        explained = True
    unscored = int(base.unscored.sum())
    if unscored > count / 2 and not explained:
        evidence = f"no function gives a reward for {unscored} of {count} completions."
        _, proof = _other_form(run)
        yield Finding("reward-failing", "error", evidence, "Let one return a number for every row.", proof)


def _scores_other_rows(run: ExaminedRun, function: int) -> bool:
    """True if a function that abstains on the sampled prompts gives rewards to further rows of the dataset."""
    if not run.rescores:
        return False
    rows = run.taken[:MOST_FURTHER]
    kept = run.failure
    scored = run.totals(rows, [run.answering(row, right_answer(row) or "yes") for row in rows], function)
    run.failure = kept
    return not bool(scored.isnan().all())


def _silent_about_wrong(run: ExaminedRun) -> Finding | None:
    """Groups in which some completions get one and the same reward, and the others None."""
    base = run.base
    errors = torch.tensor([one.finish is FinishReason.ERROR for one in base.rollouts]).view_as(base.totals)
    silent = base.unscored & ~errors
    mixed = int((silent.any(1) & ~base.totals.isnan().all(1)).sum())
    if base.spread.nan_to_num().any() or mixed < max(2, base.prompts / 4):
        return None
    names = " and ".join(run.suite.names)
    return Finding(
        "reward-failing",
        "error",
        f"{names} returns None for {int(silent.sum())} of {len(base.present)} completions, and one and the same"
        " reward for the others of a prompt: None is no reward, and a completion without one is compared with none.",
        "Return a lower number than that of a right answer (0, say) instead of None, which is for rows that are not the"
        " function's own.",
        f"With a lower reward in place of None {mixed} of {base.prompts} groups have a signal, instead of none.",
        Effect(0.0, mixed / base.prompts),
    )


def _other_form(run: ExaminedRun) -> tuple[str, str]:
    """Fix and proof: the functions on texts instead of messages, or the other way round."""
    samples, rollouts, kept = run.base.samples[:8], run.base.rollouts[:8], run.failure
    conversational = is_conversational(samples[0].row.get("prompt"))
    texts = [completion_text(one.completion) for one in rollouts]
    shown: list[Any] = texts if conversational else [[{"role": "assistant", "content": text}] for text in texts]
    changed = [replace(one, completion=new, finish=FinishReason.STOP) for one, new in zip(rollouts, shown, strict=True)]
    known, other = (int((~run.score(samples, these)[0].isnan().all(1)).sum()) for these in (rollouts, changed))
    run.failure = kept
    if other <= known:
        return (
            "Correct the function: `covey rewards test` calls it on completions, and shows the error.",
            f"Called again on {len(changed)} completions, it scores {known} of them.",
        )
    if conversational:
        given, wanted, fix = "messages", "text", "read them with covey.rewards.completion_text"
    else:
        given, wanted, fix = "text", "messages", "use them as they are, without ['content']"
    return (
        f"Completions are {given} here, as the prompts are: {fix}.",
        f"Given {wanted} instead of {given}, {other} of {len(changed)} completions get a reward, not {known}.",
    )


def _late(run: ExaminedRun, evidence: str) -> Finding:
    fix = (
        "Let it answer sooner: score completions concurrently (`async def` with `covey.per_completion`), keep what is"
        " computed again, or lower the time limits inside of it."
    )
    started = time.perf_counter()
    run.score(run.base.samples[:1], run.base.rollouts[:1])
    proof = f"A single completion takes {time.perf_counter() - started:.1f} s."
    return Finding("reward-slow", "error", evidence, fix, proof)


def slow(run: ExaminedRun) -> Iterator[Finding]:
    """Seconds of rewards for a rollout batch, compared with the seconds of sampling and of an update."""
    base = run.base
    count, algebra = len(base.rollouts), run.trainer.run.algebra
    factor = algebra.generation_batch_size / count
    others = run.summary.get("seconds_of_sampling_and_updates", base.seconds * factor)
    shown = "sampling and updates take" if "seconds_of_sampling_and_updates" in run.summary else "sampling takes"
    for name in run.suite.names:
        stat = base.stats.get(f"rewards/{name}/seconds")
        seconds = stat.value() if stat is not None else 0.0
        whole = seconds * factor
        if seconds < 0.3 or whole < 1.0 or whole < 0.5 * others:
            continue
        few = max(count // 4, 1)
        started = time.perf_counter()
        run.score(base.samples[:few], base.rollouts[:few])
        part = time.perf_counter() - started
        yield Finding(
            "reward-slow",
            "warning",
            f"{name} takes {seconds:.2g} s for {count} completions: {whole:.2g} s of a step; {shown} {others:.2g} s.",
            "Score completions while others are sampled and concurrently: `async def` with `covey.per_completion`;"
            " stream_rewards=True for functions of a group; keep what is computed again.",
            f"{few} of the completions take {part:.2g} s: the time is spent on each completion."
            if part < 0.5 * seconds
            else f"{few} of the completions take {part:.2g} s as well: the time is spent on each call.",
        )


def order(run: ExaminedRun) -> Iterator[Finding]:
    """The same completions again, reversed, and one group at a time."""
    base = run.base
    if not run.rescores or not len(base.known):
        return
    scale = (base.known.max() - base.known.min()).item() or 1.0
    samples, rollouts = base.samples, base.rollouts
    first, again = base.rewards, run.score(samples, rollouts)[0]
    back = run.score(samples[::-1], rollouts[::-1])[0].flip(0)
    half = len(rollouts) // 2 or 1
    second, begin = (run.score(samples[part], rollouts[part])[0] for part in (slice(half, None), slice(half)))
    halves = torch.cat([begin, second])

    def changed(other: Tensor) -> int:
        differs = (first - other).abs() > 0.02 * scale
        return int((differs | (first.isnan() != other.isnan())).any(1).sum())

    repeated, reversed_, parted, count = changed(again), changed(back), changed(halves), len(rollouts)
    chance = _chance(run, again)
    rewarded = int((base.known > base.known.min()).sum())
    kept = repeated > count / 10 or 0 < repeated > rewarded / 2  # few may be rewarded at all
    if kept:
        evidence = (
            f"called twice on the same {count} completions, rewards of {repeated} change: {chance:.0%} of what differs"
            " within groups differs between calls as well."
        )
        fix = "Remove what it keeps between calls, or draws at random: equal completions must get equal rewards."
        if chance < NOISY:
            fix += " Where that is how it judges, larger groups and batches average it out."
    elif reversed_ > count / 10 or (reversed_ > 1 and not repeated):
        evidence = f"with the same {count} completions in reverse order, rewards of {reversed_} change."
        fix = "Let it judge a completion by itself and by its own row: pair lists with zip, without global positions."
    elif parted > count / 4 and parted > 2:
        evidence = f"called on one half of {count} completions after the other, rewards of {parted} change."
        fix = "Compare a completion only with other completions of its prompt, not with a whole batch."
    else:
        return
    varied = torch.stack([first, again, back, halves]).double().std(0).mean().item()
    yield Finding(
        "reward-order",
        "error" if (chance >= NOISY if kept else reversed_ > count / 10) else "warning",
        evidence,
        fix,
        f"Over four orders a reward moves by {varied:.3g} on average, in a range of {scale:.3g}; called again,"
        f" {repeated} of {count} change.",
    )


def remembered(run: ExaminedRun) -> Iterator[Finding]:
    """The same completions once more after all experiments, and as often as a few seconds of quick functions allow."""
    base = run.base
    if not run.rescores or not len(base.known) or run.failure is not None or run.left < 0:
        return
    scale = (base.known.max() - base.known.min()).item() or 1.0
    count, rewarded = len(base.rollouts), int((base.known > base.known.min()).sum())
    most = min(run.steps * run.trainer.run.algebra.generation_batch_size, MOST_CALLED) // count + 1
    began = time.perf_counter()
    for times in range(1, most + 1):
        other = run.score(base.samples, base.rollouts)[0]
        changed = int(
            (((base.rewards - other).abs() > 0.02 * scale) | (base.rewards.isnan() != other.isnan())).any(1).sum()
        )
        if changed > count / 10 or 0 < changed > rewarded / 2:
            break
        if (spent := time.perf_counter() - began) > min(2.0, run.left / 10) or spent / times > QUICK:
            return
    else:
        return
    mean = weighted_total(other.double(), run.weights.double()).nanmean().item()
    yield Finding(
        "reward-order",
        "error",
        f"the function has a memory: of the same {count} completions {changed} get other rewards than when the"
        f" examination began, {mean:.3g} on average instead of {base.mean:.3g}.",
        "Remove what it keeps between calls (counters, allowances, schedules, sets of what was seen): equal completions"
        " must get equal rewards throughout a run. A schedule belongs to the settings, not into the function.",
        f"After all experiments, and {times} further calls with the same completions.",
    )


def _chance(run: ExaminedRun, again: Tensor) -> float:
    """Share of what differs within groups that differs between two calls as well: 1 less their correlation."""
    other = weighted_total(again.double(), run.base.weights.double()).view_as(run.base.totals)
    return 1 - max(group_correlation(run.base.totals, other), 0.0)
