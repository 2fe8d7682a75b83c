"""Rows: prompts without text, rows that repeat, their order, right answers in prompts, and evaluation sets."""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from covey.core.findings import Effect, Finding
from covey.core.likeness import reference_of
from covey.core.transcript import content_text
from covey.data.sources import Sources
from covey.rollout.prompts import is_conversational
from covey.trainer.evaluation.suites import EvalSuite
from covey_tools.doctor.examined import MOST_ROWS, PROMPTS, SAMPLES, ExaminedRun

FRAME = 3  # characters on one side of an answer that stands in the same place of every prompt
MANY = 10  # times as often as the others, by which a row has been multiplied


def empty(run: ExaminedRun) -> Iterator[Finding]:
    """Prompts without text or images, where no environment adds any."""
    if not run.rescores:
        return
    blank = [not _has_content(row.get("prompt")) for row in run.taken]
    count, total = sum(blank), len(blank)
    if not count or (count == total and all(reference_of(row) is None for row in run.taken)):
        return  # none, or text of the model's own choice is what the run is about
    yield Finding(
        "prompt-empty",
        "error" if count > total / 2 else "warning",
        f"{count} of {total} prompts hold no text, row {run.numbers[blank.index(True)]} for example: their completions"
        " answer nothing.",
        "Remove these rows, or fill their prompts: the question may stand in another column (`columns`).",
        f"{total - count} of the {total} rows hold text.",
    )


def _has_content(prompt: Any) -> bool:
    if not is_conversational(prompt):
        return bool(str(prompt or "").strip())
    asked = [one for one in prompt if one.get("role") != "system"] or prompt
    plain = all(isinstance(one.get("content"), str | None) for one in asked)
    return not plain or any(content_text(one.get("content")).strip() for one in asked)


def _prompt(row: Mapping[str, Any]) -> str:
    """Text of a prompt with the roles of its messages."""
    prompt: Any = row.get("prompt")
    if not is_conversational(prompt):
        prompt = [{"role": "user", "content": str(prompt or "")}]
    return "\n".join(f"{one.get('role')}: {content_text(one.get('content'))}" for one in prompt)


def _whole(row: Mapping[str, Any], columns: Iterable[str] | None = None) -> Hashable:
    """The content of a row, or of some of its columns, with the text of its prompt."""
    kept = {name: row[name] for name in (row if columns is None else columns) if name in row}
    return json.dumps({**kept, "prompt": _prompt(row)}, sort_keys=True, default=str)


def contradicting(run: ExaminedRun) -> Iterator[Finding]:
    """Prompts with several right answers."""
    rows = run.taken
    wanted: dict[str, set[str | None]] = {}
    for row in rows:
        wanted.setdefault(_prompt(row), set()).add(reference_of(row))
    several = [prompt for prompt, answers in wanted.items() if len(answers) > 1]
    if not run.rescores or len(several) <= len(wanted) / 10:
        return  # of an environment a column is a state
    shown = ", ".join(map(repr, sorted(map(str, wanted[several[0]]))[:4]))
    yield Finding(
        "data-contradicts",
        "warning",
        f"{len(several)} of {len(wanted)} different prompts have several right answers in the data:"
        f" {several[0][-60:]!r} has {shown}. What one row rewards another one does not.",
        "Keep the right row of each prompt, or one row with all answers that count.",
        f"{len(rows)} rows have {len(wanted)} different prompts and {len(set(map(_whole, rows)))} contents.",
    )


def repeated(run: ExaminedRun) -> Iterator[Finding]:
    """Rows that are in the dataset several times."""
    rows = run.taken
    counts = Counter(map(_whole, rows)).most_common()
    usual = counts[len(counts) // 2][1]
    multiplied = sum(times for _, times in counts if times >= MANY * usual)
    if len(counts) > len(rows) / 2 and multiplied < len(rows) / 10:
        return
    uneven = multiplied >= len(rows) / 10
    yield Finding(
        "data-repeated",
        "warning" if uneven else "note",
        f"{len(rows)} rows are {len(counts)} different ones; the most frequent is there {counts[0][1]} times, and half"
        f" of them {usual} times or more.",
        "Remove repeated rows: num_train_epochs or max_steps read all rows as often as needed, each as often as"
        " others."
        + ("" if uneven else " With few prompts, hold some out to see whether the policy learns the task or the rows."),
        f"{len(counts)} rows remain, with {len(set(map(_prompt, rows)))} different prompts.",
    )


def order(run: ExaminedRun) -> Iterator[Finding]:
    """Samples of the first and the last rows that an unshuffled run reads, and of the rows that it does not reach."""
    args = run.args
    chosen = args.shuffle_dataset or args.prompt_sampler != "uniform"
    if not hasattr(run.rows, "__len__") or isinstance(run.rows, Sources) or chosen:
        return
    read, count = run.rows_read, len(run.rows)
    parts = {
        "first": range(max(read // 3, 1)),
        "last": range(read - max(read // 3, 1), read),
        "other": range(read, count),  # which the run does not reach
    }
    if read < 3 * PROMPTS or not run.has_time("data-order"):
        return
    signal, means, asked = {}, {}, {}
    for name, numbers in parts.items():
        places = [numbers[n * len(numbers) // PROMPTS] for n in range(PROMPTS)] if len(numbers) >= PROMPTS else []
        if places:
            rows = [(number, dict(run.rows[number])) for number in places]
            batch = run.sampled_of(rows, min(max(SAMPLES, run.group), 16), max_tokens=run.base.limit)
            asked[name], signal[name], means[name] = places, batch.signal(run.group), batch.mean
    without = [name for name in asked if signal[name] == 0 and name != "other"]
    rich = max(asked, key=lambda name: signal[name])
    if not without or signal[rich] < 1 / 3:
        return
    poor = without[0]
    where = {
        "first": f"the first {len(parts['first'])} rows",
        "last": f"the last {len(parts['last'])} of {read} rows that the run reads",
        "other": f"the {count - read} rows that it does not come to",
    }
    yield Finding(
        "data-order",
        "error" if signal["first"] == 0 and signal["last"] == 0 else "warning",
        f"shuffle_dataset=False, and the rows are in an order: no group of {where[poor]} has a signal (mean reward"
        f" {means[poor]:.3g}), and {signal[rich]:.0%} of {where[rich]} have one (mean reward {means[rich]:.3g}).",
        "Set shuffle_dataset=True, so that every update sees rows of all kinds; or prompt_sampler=difficulty.",
        f"{PROMPTS} prompts of each part were sampled {min(max(SAMPLES, run.group), 16)} times.",
        Effect(signal[poor], sum(signal.values()) / len(signal)),
    )


def answer_in_prompt(run: ExaminedRun) -> Iterator[Finding]:
    """Right answers that stand in the prompt at one place, with something else to be read from the prompt."""
    rows = [row for row in run.taken if reference_of(row)]
    if len(rows) < max(8, len(run.taken) / 2):
        return
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    rest: set[str] = set()
    for row in rows:
        prompt, answer = _prompt(row), str(reference_of(row))
        places = [*re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt, re.IGNORECASE)]
        before.update({prompt[max(one.start() - FRAME, 0) : one.start()] for one in places})
        after.update({prompt[one.end() : one.end() + FRAME] for one in places if one.end() < len(prompt)})
        rest.add(re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "", prompt, flags=re.IGNORECASE))
    frames = [*before.most_common(1), *after.most_common(1)]
    if not frames or len(rest) < len(rows) / 4 or len({reference_of(row) for row in rows}) < 4:
        return
    frame, hits = max(frames, key=lambda pair: pair[1])
    if hits < 0.9 * len(rows):
        return
    yield Finding(
        "answer-in-prompt",
        "note",
        f"the right answer stands in {hits} of {len(rows)} prompts, always next to {frame!r}: the policy may learn to"
        f" copy it. The first: {_prompt(rows[0])[-80:]!r}, where {reference_of(rows[0])!r} is right.",
        "If prompts should not tell the answer, remove it from them; where it is to be found in the text, all is well.",
        f"Without the answer {len(rest)} of the {len(rows)} prompts still differ.",
    )


def evaluation(run: ExaminedRun) -> Iterator[Finding]:
    """Evaluation sets whose rows are trained on, or whose prompts have another system message."""
    for name, rows in run.evaluations.items():
        called = f"eval_dataset {name!r}" if name else "eval_dataset"
        held = [dict(row) for row in islice(iter(rows), MOST_ROWS)]
        everything = run.rows if hasattr(run.rows, "__len__") and len(run.rows) <= 100 * MOST_ROWS else run.taken
        both = {*run.taken[0]} & {*held[0]} if run.taken and held else set()
        known = {_whole(dict(row), both) for row in everything}
        seen = sum(_whole(row, both) in known for row in held)
        if seen > max(1, len(held) / 10):
            yield Finding(
                "eval-overlap",
                "warning",
                f"{seen} of {len(held)} rows of {called} are rows of the training data: its results say what the"
                " policy has seen, not what it has learnt.",
                "Evaluate on rows that are held out, as by `dataset_split: train[100:]` and a split `train[:100]`.",
                f"{len(held) - seen} of the {len(held)} rows are new to the policy.",
            )
        ours, theirs = ({_system(row) for row in some} for some in (run.taken, held))
        if held and not ours & theirs and len(ours) <= max(3, len(run.taken) / 10):
            shown = [repr(next(iter(some))[:60]) if some != {""} else "none" for some in (theirs, ours)]
            yield Finding(
                "eval-differs",
                "warning",
                f"prompts of {called} have another system message than the training data's: {shown[0]}, and"
                f" {shown[1]} there.",
                "Give both the same (`system_prompt` of a run file does), unless the difference is what is measured.",
                f"None of {len(theirs)} system messages of the evaluation is among {len(ours)} of the training data.",
            )


def _system(row: Mapping[str, Any]) -> str:
    prompt: Any = row.get("prompt")
    messages = prompt if is_conversational(prompt) else ()
    return "\n".join(content_text(one.get("content")) for one in messages if one.get("role") == "system")


def sets_of(given: Any) -> dict[str, Any]:
    """Rows of evaluation sets by name, of what a trainer takes as `eval_dataset`."""
    if given is None:
        return {}
    named = given if isinstance(given, dict) else {"": given}
    return {str(name): one.dataset if isinstance(one, EvalSuite) else one for name, one in named.items()}
