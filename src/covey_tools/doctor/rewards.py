"""Rewards: called again, in another order and on other texts, which shows what they depend on."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import EPSILON, centred, nanstd, weighted_total
from covey.core.findings import Effect, Finding
from covey.core.likeness import REFERENCES
from covey.core.records import FinishReason
from covey.rewards.contract import MissingArgument
from covey.rewards.functions import FunctionReward
from covey.rewards.text import completion_text
from covey.rollout.prompts import is_conversational
from covey.runtime.user_code import unwrap_partial
from covey_tools.doctor.examined import PROMPTS, SAMPLES, ExaminedRun, SampleBatch

FORMS = (
    "{0}",
    "{0}\n",
    "The answer is {0}.",
    "\\boxed{{{0}}}",
    "<answer>{0}</answer>",
    "<think>\nIt is {0}.\n</think>\n<answer>\n{0}\n</answer>",
    "<think>\nIt is {0}.\n</think>\n{0}",
    "#### {0}",
    "Answer: {0}",
    "**{0}**",
    "```\n{0}\n```",
)
"""Ways to write an answer that rewards ask for."""

WILDCARD = r"(?:(?<!\\)\[(?:\\.|[^\]\\])+\]|\\[dwS]|(?<!\\)\.)(?:[*+]\??|\{[\d,]+\})?"
"""Of a pattern what an answer may stand for: `.*?`, `\\d+`, `[0-9.]*`."""

NOISY = 0.5  # share of the differences within groups from which on most of what is learnt is chance
MOST_CALLED, QUICK = 20_000, 0.05  # completions that a function is called with for its memory alone; seconds of a call
LENGTH_ALONE = 0.95  # correlation with the reward of filler: less than a tenth of the variance is left to content
MOST_FURTHER = 256  # rows, or texts of a function's own constants, that are scored in addition
TEXTS = ("", "?", "yes", "42", "I do not know.", "so " * 200, "AaZz 0123456789 .,;:!?()[]{}<>\"'\n" * 3)


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
    explained = False
    for index, name in enumerate(run.suite.names):
        failures, late = (int(base.stats[f"rewards/{name}/{kind}"].value()) for kind in ("failures", "timeouts"))
        missing = int(base.rewards[:, index].isnan().sum()) - failures - late
        count = len(base.rollouts)
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
    unscored = int(base.totals.isnan().sum())
    if unscored > len(base.rollouts) / 2 and not explained:
        evidence = f"no function gives a reward for {unscored} of {len(base.rollouts)} completions."
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
    silent = base.totals.isnan() & ~errors
    mixed = int((silent.any(1) & ~base.totals.isnan().all(1)).sum())
    if base.spread.nan_to_num().any() or mixed < max(2, base.prompts / 4):
        return None
    names = " and ".join(run.suite.names)
    return Finding(
        "reward-failing",
        "error",
        f"{names} returns None for {int(silent.sum())} of {base.totals.numel()} completions, and one and the same"
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
    """Seconds of rewards for a rollout batch, next to those of sampling and of an update."""
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
        fix = "Compare a completion with those of its own prompt at most, not with a whole batch."
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
    return 1 - max(_follows(run.base.totals, other), 0.0)


def flat(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards without a difference in any group: constant, saturated or out of reach, as other texts show."""
    base = run.base
    if not len(base.known):
        return
    if run.needs_calls and not any(one.calls for one in base.rollouts):
        return  # texts call no tool, so they tell nothing of a reward that may be for calls: see `tools.calls`
    if len(run.suite.names) > 1:
        if (cancelled := _cancelling(base, run.suite.names)) is not None:
            yield cancelled
            return
        yield from _flat_functions(run)
    value = base.known.max().item()
    share = (base.known == value).double().mean().item()
    high = value > base.known.min().item() or share == 1.0
    if base.signal(run.group) > 0.2 and share < 0.9:
        return
    if not run.rescores:
        if share == 1.0:
            yield from _whatever_is_played(run, value)
        return
    tried = texts_tried(run)
    lowest, best = min(low for low, _, _ in tried), max(tried, key=lambda one: one[1])
    differs = any(high > low for low, high, _ in tried)
    if not differs and not base.spread.any():
        hits, further = _further(run)
        if hits:
            yield _rare(f"{hits} of {further} completions of further prompts differ from their group", "")
            return
        if (other := _other_column(run, value)) is not None:
            yield other
            return
        by_prompt = f"rewards are {base.mean:.3g} on average, which depends on the prompt alone."
        yield Finding(
            "reward-constant",
            "error",
            f"all of {len(base.known)} completions get {value:g}." if share == 1 else by_prompt,
            "Correct the reward function so that it reads the completion.",
            f"Any text gets the same: {len(FORMS) + len(TEXTS)} others were tried for each of {len(tried)} prompts.",
        )
    elif high and share > 0.85 and lowest < value - 1e-9 and best[1] <= value + 1e-9:
        yield Finding(
            "reward-saturated",
            "error" if base.signal(run.group) < 0.1 else "warning",
            f"{share:.0%} of the completions get {value:g}, the most there is, before any training.",
            "Take harder prompts, or a stricter reward that grades among good completions.",
            f"Texts without an answer get down to {lowest:g}, so the reward works; none of those tried gets more.",
        )
    elif share == 1.0 and best[1] > value:
        yield from _unreachable(run, value, best)


def _whatever_is_played(run: ExaminedRun, value: float) -> Iterator[Finding]:
    """Rollouts in environments, or by functions, that all earn the same."""
    hits, further = _further(run)
    count, played = len(run.base.known), len(set(run.base.texts))
    if hits:
        yield _rare(f"groups with another reward than {value:g} are {hits} among {count + further} rollouts", "")
        return
    yield Finding(
        "reward-constant" if value > 0 else "reward-unreachable",
        "error",
        f"all of {count} rollouts get {value:g}, though {played} of them differ in what the policy says.",
        "Play an episode by hand with the right moves: does `reset` keep what the reward reads, and does a good episode"
        " get more? If it does, begin with tasks that the policy solves now and then.",
        f"No group among {further} rollouts of further prompts has another reward.",
    )


def _cancelling(base: SampleBatch, names: Sequence[str]) -> Finding | None:
    """Functions that differ within groups, and whose weighted sum does not."""
    weighted = base.rewards.double().view(base.prompts, base.size, -1) * base.weights.double()  # [P, G, F]
    deviations = nanstd(weighted, dim=1)[:, 0].nanmean(0)  # [F]
    loudest = deviations.argsort(descending=True)[:2].tolist()
    if len(loudest) < 2 or deviations[loudest[1]] < 1e-9 or base.spread.nanmean() > 1e-6 * deviations[loudest[0]]:
        return None
    one, other = (names[index] for index in loudest)
    against = _follows(weighted[..., loudest[0]], weighted[..., loudest[1]])
    return Finding(
        "reward-constant",
        "error",
        f"{one} and {other} cancel each other: each differs within groups, by {deviations[loudest[0]]:.3g}"
        f" (standard deviation, weighted), and the sum of all functions is {base.mean:.3g} for every completion.",
        f"Remove {one} or {other}, or give them other reward_weights: what the one pays the other takes.",
        f"Within groups the correlation of the two is {against:.2f}.",
    )


def _flat_functions(run: ExaminedRun) -> Iterator[Finding]:
    """Functions that give one value to all completions while others differ."""
    base = run.base
    for index, name in enumerate(run.suite.names):
        known = base.rewards[:, index][~base.rewards[:, index].isnan()]
        if len(known) < 2 or not (known == known[0]).all() or not base.spread.any() or not base.weights[index]:
            continue
        value, tried = known[0].item(), texts_tried(run, index) if run.rescores else []
        best = max(tried, key=lambda one: one[1], default=(value, value, ""))
        lowest, other = min((low for low, _, _ in tried), default=value), len(FORMS) + len(TEXTS)
        evidence = f"{name} gives {value:g} to all of {len(known)} completions; other functions differ."
        if best[1] > value + 1e-6:
            yield Finding(
                "reward-unreachable",
                "warning",
                evidence,
                f"Let the prompts say (or show) what {name} asks for, or let it reward partly right answers: as it is,"
                " only the other functions teach anything.",
                f"{name} works: the text {best[2][:80]!r} gets {best[1]:g}.",
            )
        elif lowest < value - 1e-6:
            proof = f"Texts without an answer get down to {lowest:g} from it; none of those tried gets more."
            yield Finding("reward-saturated", "note", evidence, f"{name} has nothing left to teach.", proof)
        else:
            proof = f"Any text gets the same from it: {other} others were tried for each of {len(tried)} prompts."
            fix = f"Look at {name} and its columns: it must give a right answer another reward than a wrong one."
            useless = bool(tried) and base.weights[index] >= base.weights.max() and value <= 0
            yield Finding("reward-constant", "warning" if useless else "note", evidence, fix, proof if tried else "")


def texts_tried(run: ExaminedRun, function: int | None = None, most: int = 4) -> list[tuple[float, float, str]]:
    """For a few prompts the lowest and highest reward of other texts, and the text of the highest.

    Of all functions together, or of one alone.
    """
    base, found = run.base, []
    for start in range(0, min(base.prompts, most) * base.size, base.size):
        row = base.samples[start].row
        answers = [str(row[name]) for name in row if name != "prompt" and isinstance(row[name], str | int | float)]
        answers.sort(key=len)
        texts = [text for answer in answers[:4] for text in _written(answer)]
        texts += [*TEXTS, *(json.dumps({"answer": answer}) for answer in answers[:2])]
        own = [completion_text(one.completion) for one in base.rollouts[start : start + 2]]
        texts += [*own, *_written("0")]
        texts += [f"{text}\n{texts[n]}" for n, text in enumerate(own)]
        texts += [text for answer in answers[:2] for text in _of_constants(run, answer)]
        values = [held for name, held in row.items() if name != "prompt" and isinstance(held, str | int | float)]
        texts += [json.dumps({key: value}) for key in _keys(run) for value in values[:4]]
        totals = run.totals([row] * len(texts), [run.answering(row, text) for text in texts], function)
        known = [(value, text) for value, text in zip(totals.tolist(), texts, strict=True) if value == value]
        if known:
            found.append((min(known)[0], *max(known, key=lambda pair: pair[0])))
    return found or [(0.0, 0.0, "")]


def _written(answer: str) -> list[str]:
    return [form.format(answer) for form in FORMS]


def _of_constants(run: ExaminedRun, answer: str) -> list[str]:
    """An answer together with the texts and patterns that reward functions compare with."""
    texts = []
    for one in run.suite.functions:
        for constant in constants_of(one.function) if isinstance(one, FunctionReward) else ():
            texts += [constant + answer, answer + constant]
            if (matching := text_matching(constant, answer)) is not None:
                texts.append(matching)
    return texts[:MOST_FURTHER]


def _keys(run: ExaminedRun) -> list[str]:
    """Texts in reward functions that may be keys of JSON."""
    functions = [one.function for one in run.suite.functions if isinstance(one, FunctionReward)]
    return [text for function in functions for text in constants_of(function) if text.isidentifier()][:8]


def constants_of(function: Any) -> list[str]:
    """Texts in a function's body, and the texts and patterns of its module that it names.

    Example:
        >>> constants_of(lambda text: text.startswith("Answer: "))
        ['Answer: ']
    """
    code = getattr(unwrap_partial(function), "__code__", None)
    if code is None:
        return []
    module = getattr(unwrap_partial(function), "__globals__", {})
    bodies = [code]
    for body in bodies:  # which grows by the comprehensions and functions within
        bodies += [one for one in body.co_consts if isinstance(one, CodeType)]
    held = [one for body in bodies for one in (*body.co_consts, *(module.get(name) for name in body.co_names))]
    held = [one.pattern if isinstance(one, re.Pattern) else one for one in held]
    document = getattr(unwrap_partial(function), "__doc__", None)
    texts = [one for one in held if isinstance(one, str) and 0 < len(one) <= 200 and one != document]
    return [*dict.fromkeys(one for one in texts if "<locals>" not in one)]  # which are names of functions within


def text_matching(pattern: str, answer: str) -> str | None:
    """A text that a regular expression of literal marks and wildcards matches, with the answer in its wildcards.

    Example:
        >>> text_matching(r"^<a>(.*?)</a>\\s*$", "7"), text_matching(r"\\[(\\d+)\\]", "7"), text_matching("(", "7")
        ('<a>7</a>', '[7]', None)
    """
    try:
        compiled = re.compile(pattern)
    except re.error:
        return None
    text = re.sub(r"\(\?[aimsux]+\)|\\\W\?", "", pattern)  # flags, and marks that need not be there
    text = re.sub(WILDCARD, lambda found: answer, text)
    text = re.sub(r"\(\?:|(?<!\\)[\^$]|\\[AZb]", "", text)  # openings of groups, anchors
    text = re.sub(r"\\s[*?]+", "", re.sub(r"\\n[*+?]*", "\n", text))
    text = re.sub(r"\\s\+?", " ", text)
    text = re.sub(r"(?<!\\)[()]\??", "", text)
    text = re.sub(r"\\(\W)", r"\1", text)
    found = compiled.search(text)
    return text if found is not None and found.end() > found.start() else None


def _other_column(run: ExaminedRun, value: float) -> Finding | None:
    """A column whose values the reward cannot match: written otherwise, or with another's, it can."""
    row, kept = run.base.samples[0].row, run.failure
    columns = {name: held for name, held in row.items() if name != "prompt"}
    until = min(0.0, run.left - run.seconds / 10)  # a tenth of the time, where it is used up
    for name, held in columns.items():
        others = [(other, written) for other, written in columns.items() if other != name]
        for other, written in [*((None, changed) for changed in _otherwise(held)), *others]:
            if run.left < until:
                run.leave_out("time", "data-columns")
                return None
            texts = [*_written(str(written)), *_written(str(held)), *TEXTS]  # the last are no answers
            rollouts = [run.answering(row, text) for text in texts]
            totals = run.totals([{**row, name: written}] * len(texts), rollouts).nan_to_num(value).tolist()
            run.failure = kept  # a function need not take what a column does not hold
            best, text = max(zip(totals, texts, strict=True), key=lambda pair: pair[0])
            if best > max(value, min(totals)) + 1e-9:
                return Finding(
                    "data-columns" if other else "reward-unreachable",
                    "error",
                    f"all of {len(run.base.known)} completions get {value:g}, and so does {held!r:.80}, which the"
                    f" column {name} holds.",
                    f"Give the function the column {other} as {name} (`columns`)."
                    if other
                    else f"Write the column {name} as the function compares it, or bring both sides into one form in"
                    " the function (case, spaces, numbers).",
                    f"With {written!r:.80} in the column the text {text[:80]!r} gets {best:g}.",
                )
    return None


def _otherwise(value: Any) -> list[Any]:
    """Other ways to hold a value of a column.

    Example:
        >>> _otherwise("The sum is\\n#### 42")
        ['the sum is\\n#### 42', 'THE SUM IS\\n#### 42', '42', 42.0]
        >>> _otherwise(42), _otherwise([" Paris\\n"])
        (['42'], [' Paris\\n', 'Paris'])
    """
    if isinstance(value, list | tuple):
        return [one for item in value[:1] for one in (item, *_otherwise(item)[-1:])]
    if not isinstance(value, str):
        return [str(value)] if isinstance(value, int | float) else []
    numbers = re.findall(r"-?\d+(?:\.\d+)?", value)[-1:]
    others = [value.lower(), value.upper(), value.strip(), *numbers, *map(float, numbers)]
    return [other for other in others if other != value]


def _unreachable(run: ExaminedRun, value: float, best: tuple[float, float, str]) -> Iterator[Finding]:
    """No sample gets more than the least; looked at further prompts, as a hard task has a hit now and then."""
    hits, further = _further(run)
    count = len(run.base.known) + further
    if hits:
        works = f"The text {best[2][:60]!r} gets {best[1]:g}, so the reward works."
        yield _rare(f"groups with another reward than {value:g} are {hits} among {count} completions", works)
        return
    if (written := _column_written_otherwise(run, value)) is not None:
        yield written
        return
    fix = (
        "Let the prompts say (or show) what the reward asks for, reward steps on the way to it, or train the model on"
        " examples first; then check that some completions get it."
    )
    works = (
        f"The reward works: the text {best[2][:80]!r} gets {best[1]:g}; the model wrote"
        f" {completion_text(run.base.rollouts[0].completion)[:80]!r}."
    )
    shown = _with_an_example(run, value)
    if shown is not None:
        example, batch, hits = shown
        fix = (
            f"Put an example into the prompt: another row's question as the user's and {example[:80]!r} as the"
            " assistant's answer, before the question itself. Or let the prompts say what the reward asks for."
        )
        works += (
            f" With one such example {hits} of {len(batch.rollouts)} completions get more than {value:g}, and the mean"
            f" reward is {batch.mean:.3g} instead of {run.base.mean:.3g}."
        )
    yield Finding("reward-unreachable", "error", f"none of {count} completions gets more than {value:g}.", fix, works)


def _with_an_example(run: ExaminedRun, value: float) -> tuple[str, SampleBatch, int] | None:
    """A rewarded text, and completions of prompts that show it as the answer of another row; None if none is rewarded.

    Each prompt is shown the example of the next row, so that no answer is its own.
    """
    base = run.base
    rows = [one.row for one in base.samples[:: base.size]]
    if not run.single or len(rows) < 2 or not all(is_conversational(row.get("prompt")) for row in rows):
        return None
    if not run.has_time("reward-unreachable"):
        return None
    best = [text for _, high, text in texts_tried(run, most=len(rows)) if high > value]
    if len(best) < len(rows):
        return None
    examples = dict(zip(map(id, rows), [*zip(rows[1:], best[1:], strict=True), (rows[0], best[0])], strict=True))

    def encode(row: dict[str, Any]) -> list[int]:
        other, text = examples[id(row)]
        asked, question = row["prompt"], [one for one in other["prompt"] if one["role"] != "system"]
        begin = [one for one in asked if one["role"] == "system"]
        rest = [one for one in asked if one["role"] != "system"]
        ids: list[int] = run.codec.read([*begin, *question, {"role": "assistant", "content": text}, *rest]).ids
        return ids

    batch = run.again(encode=encode)
    hits = int((batch.known > value + 1e-9).sum())
    return (best[0], batch, hits) if hits > len(batch.rollouts) / 20 else None


def _last_number(text: str) -> str:
    return (re.findall(r"-?\d+(?:\.\d+)?", text) or [text])[-1]


WRITTEN: dict[str, Callable[[str], str]] = {
    "without spaces around it": str.strip,
    "in lower case": str.lower,
    "in upper case": str.upper,
    "with a capital": str.capitalize,
    "without spaces and case": lambda text: text.strip().lower(),
    "without a full stop": lambda text: text.strip().rstrip("."),
    "as its last number": _last_number,
}
"""Ways to write what a column holds, by how they are called."""


def _column_written_otherwise(run: ExaminedRun, value: float) -> Finding | None:
    """A column that completions match, once it is written as they are."""
    base, kept = run.base, run.failure
    for name, held in base.samples[0].row.items():
        if name == "prompt" or not isinstance(held, str):
            continue
        for how, write in WRITTEN.items():
            if not run.has_time("reward-unreachable"):
                return None
            rows = [{**one.row, name: write(str(one.row[name]))} for one in base.samples]
            if all(row[name] == one.row[name] for row, one in zip(rows, base.samples, strict=True)):
                continue
            totals = run.totals(rows, base.rollouts).nan_to_num(value)
            run.failure = kept
            if (hits := int((totals > value + 1e-9).sum())) > 1:
                return Finding(
                    "reward-unreachable",
                    "error",
                    f"all of {len(base.known)} completions get {value:g}: the column {name} holds {held[:60]!r}, and"
                    f" none is written so.",
                    f"Write the column {name} {how}, or compare both without case and spaces in the function.",
                    f"With {name} {how} {hits} of the same {len(base.rollouts)} completions get more, and the mean"
                    f" reward is {totals.mean():.3g} instead of {base.mean:.3g}.",
                    Effect(base.mean, totals.mean().item()),
                )
    return None


def _rare(evidence: str, proof: str) -> Finding:
    fix = "Take easier prompts first (prompt_sampler=difficulty, dynamic_sample=True), or a reward that grades parts."
    return Finding("signal-sparse", "warning", f"most groups have no signal: {evidence}.", fix, proof)


def _further(run: ExaminedRun) -> tuple[int, int]:
    """Groups with a signal among further prompts, and their completions."""
    hits, further, start = 0, 0, 1
    while run.left > 0.4 * run.seconds and start < 8 and not hits:
        batch = run.sample(16, 4, start=start, max_tokens=run.base.limit)
        further, hits, start = further + len(batch.known), int((batch.spread > 0).sum()), start + 1
    return hits, further


def small(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards so close together that the constant added to their deviation, or no scaling, leaves no advantage."""
    base, scaled = run.base, str(run.args.scale_rewards)
    deviations = base.spread[base.spread > 0]
    if not len(deviations) or run.args.method != "grpo" or run.args.advantages is not None:
        return
    if _cancelling(base, run.suite.names) is not None:  # what is left is rounding
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
        follows = [_follows(base.totals[both], grouped[both][..., index]) for index in (loud, faint)]
        if ratio < 8 or follows[0] < 0.97 or follows[1] > 0.6:
            continue
        even = (grouped / deviations.nanmean(0).clamp(min=1e-9)).nansum(-1)
        now = _follows(even[both], grouped[both][..., faint])
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


def _follows(totals: Tensor, values: Tensor) -> float:
    """Correlation within groups of two [P, G]."""
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
        f"Set reward_weights={[abs(weight) for weight in weights]}: that of {' and '.join(negative)} is negative."
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
    """Of each of a few prompts the words in which a wrong answer gets more; nothing where one gets less, too."""
    if not run.rescores or not len(run.base.known):
        return []
    shown: list[str] = []
    rows = [sample.row for sample in run.base.samples[:: run.base.size]]
    answers = [right_answer(row) for row in rows]
    for row, own in zip(rows[:4], answers, strict=False):
        wrong = next((one for one in answers if one is not None and one != own), None)
        if own is None or wrong is None:
            continue
        texts = [*_written(own), *_written(wrong)]
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


def right_answer(row: dict[str, Any]) -> str | None:
    """The content of the column of right answers, as it is written in the row."""
    name = next((name for name in REFERENCES if isinstance(row.get(name), str | int | float)), None)
    return None if name is None else str(row[name])


def length(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards that a text gets as well whose words are as many and as long, but without content."""
    found = paid_for_length(run, run.base) or _repeats(run)
    if found is not None:
        yield found


def paid_for_length(run: ExaminedRun, batch: SampleBatch) -> Finding | None:
    """The finding that rewards of these completions follow their length, whatever they say."""
    if not batch.spread.any() or not run.rescores:
        return None
    lengths = torch.tensor([len(completion_text(one.completion)) for one in batch.rollouts]).double()
    correlation = _follows(batch.totals, lengths.view_as(batch.totals))
    if abs(correlation) < 0.8:
        return None
    texts = [completion_text(one.completion) for one in batch.rollouts]
    filled, blocks = (_filler(run, batch, [re.sub(kind, "a", text) for text in texts]) for kind in (r"\w", r"\S"))
    explains = _follows(filled, batch.totals)
    if explains < LENGTH_ALONE or abs(_follows(blocks, batch.totals)) < 0.5:  # the second: it is for marks, not length
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
    return {
        "signal": len(set(base.known.tolist())) > 1 if of_batch else bool(base.spread.nan_to_num().any()),
        "completions": len(base.rollouts),
        "prompts": base.prompts,
        "reward": None if not len(base.known) else round(base.mean, 6),
        "groups_with_signal": round(sum((base.spread > 0).double().tolist()) / max(base.prompts, 1), 4),
        "groups_with_signal_expected": round(base.signal(run.group), 4),
        "cut": round(base.cut, 4),
        "seconds_of_sampling": round(base.seconds, 2),
    }
