"""Rewards without a difference: constant, saturated or out of reach, as other texts and columns show."""

from collections.abc import Iterator
from typing import Any

from covey.core.findings import Effect, Finding
from covey.rewards.text import completion_text
from covey.rollout.prompts import is_conversational
from covey_tools.doctor.examined import ExaminedRun, SampleBatch
from covey_tools.doctor.reward_texts import FORMS, TEXTS, WRITTEN, in_forms, otherwise, texts_tried
from covey_tools.doctor.reward_values import cancelling


def flat(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards without a difference in any group: constant, saturated or out of reach, as other texts show."""
    base = run.base
    if not len(base.known):
        return
    if run.needs_calls and not any(one.calls for one in base.rollouts):
        return  # texts call no tool, so they tell nothing of a reward that may be for calls: see `completions.calls`
    if len(run.suite.names) > 1:
        if (cancelled := cancelling(base, run.suite.names)) is not None:
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
            f"Texts without an answer get down to {lowest:g}, so the reward works; no text that was tried gets more.",
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
            proof = f"Texts without an answer get down to {lowest:g} from it; no text that was tried gets more."
            yield Finding("reward-saturated", "note", evidence, f"{name} has nothing left to teach.", proof)
        else:
            proof = f"Any text gets the same from it: {other} others were tried for each of {len(tried)} prompts."
            fix = f"Look at {name} and its columns: it must give a right answer another reward than a wrong one."
            useless = bool(tried) and base.weights[index] >= base.weights.max() and value <= 0
            yield Finding("reward-constant", "warning" if useless else "note", evidence, fix, proof if tried else "")


def _other_column(run: ExaminedRun, value: float) -> Finding | None:
    """A column whose values the reward cannot match: written otherwise, or with another's, it can."""
    row, kept = run.base.samples[0].row, run.failure
    columns = {name: held for name, held in row.items() if name != "prompt"}
    until = min(0.0, run.left - run.seconds / 10)  # a tenth of the time, where it is used up
    for name, held in columns.items():
        others = [(other, written) for other, written in columns.items() if other != name]
        for other, written in [*((None, changed) for changed in otherwise(held)), *others]:
            if run.left < until:
                run.leave_out("time", "data-columns")
                return None
            texts = [*in_forms(str(written)), *in_forms(str(held)), *TEXTS]  # the last are no answers
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


def _unreachable(run: ExaminedRun, value: float, best: tuple[float, float, str]) -> Iterator[Finding]:
    """No sample gets more than the least, nor does one of further prompts, as a hard task has a hit now and then."""
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
