"""Columns that reward functions read: missing, constant, or of other rows than the prompt."""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from covey.cli.explain.run import SOLUTIONS
from covey.core.findings import Finding
from covey.rewards.functions import NOT_FORWARDED, RESERVED, FunctionReward, arguments_with
from covey.rewards.text import completion_text
from covey.runtime.user_code import parameters_of, unwrap_partial
from covey_tools.doctor.examined import ExaminedRun
from covey_tools.doctor.prompts import prompt_text
from covey_tools.doctor.reward_values import turned

ANSWERS = (*SOLUTIONS, "ground_truth", "reference", "gold", "expected")  # columns that hold what is right
SHIFTS = (1, -1, 2, -2, 3, -3)
SURE = 4.0  # standard errors: of the eight ways to pair rows, chance passes it once in some 4000 datasets
BLOCK, FAR = 24, 3  # rows one after another, and neighbours on each side, whose answers are compared
CLASSED, CLEAR, MOST_OF = 24, 0.5, 0.6  # prompts after which few answers are compared; probability of one that is
# clearly preferred; share of the prompts after which one answer alone is preferred
CANDIDATES = 16  # prompts and answers that are compared with each other


def columns(run: ExaminedRun) -> Iterator[Finding]:
    """Rewards with the columns of other rows, or under other names."""
    if not run.rescores or not len(run.base.known):
        return
    yield from _unnamed(run)
    read = [name for name in run.base.samples[0].row if name not in NOT_FORWARDED and _reads(run, name)]
    for name in read:
        yield from _constant(run, name)
    for name in read:
        yield from _instead(run, name)
    for name in read:
        yield from _of_other_rows(run, name)


def _functions(run: ExaminedRun) -> Iterator[tuple[str, FunctionReward]]:
    for name, one in zip(run.suite.names, run.suite.functions, strict=True):
        if isinstance(one, FunctionReward):
            yield name, one


def _wanted(function: FunctionReward) -> set[str]:
    """Columns that a function may ask for: arguments with a default of None, and keys of its keyword arguments."""
    inner = unwrap_partial(function.function)
    parameters = parameters_of(function.function) or ()
    wanted = {p.name for p in parameters if p.default is None or p.default == [] or p.default == ()}
    source = ""
    with suppress(OSError, TypeError):
        source = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    for keywords in (p.name for p in parameters if p.kind is p.VAR_KEYWORD):
        wanted |= set(re.findall(rf"\b{keywords}(?:\.get\(|\[|\.pop\()\s*['\"](\w+)['\"]", source))
    return wanted


def _unnamed(run: ExaminedRun) -> Iterator[Finding]:
    """Optional arguments that no column fills, where a column of another name would change rewards."""
    base = run.base
    row = base.samples[0].row
    for function_name, function in _functions(run):
        bound = getattr(function.function, "keywords", None) or {}
        asked = _wanted(function)
        wanted = asked - arguments_with(row) - RESERVED - set(bound)
        read = asked | {parameter.name for parameter in parameters_of(function.function) or ()}
        has_solution = any(other in read and other in row for other in ANSWERS)
        for name in sorted(wanted):
            means: dict[str, float] = {}  # by the other column, if it changes rewards
            others = [other for other in row if other not in NOT_FORWARDED and other != name]
            for other in others:
                totals = run.totals([{**one.row, name: one.row[other]} for one in base.samples], base.rollouts)
                if (totals - base.totals.flatten()).nan_to_num().abs().max() > 1e-9:
                    means[other] = totals.nanmean().item()
            best = max(means, key=lambda other: means[other], default="")
            quiet_ = base.signal(run.group) < 0.2
            if means and (means[best] > base.mean or quiet_):
                yield Finding(
                    "data-columns",
                    "error" if quiet_ or means[best] > base.mean + 0.1 else "warning",
                    f"{function_name} asks for {name!r}, and no row has it; the rows have {', '.join(row)}.",
                    f"Write `columns: {{{best}: {name}}}` into the run file, or rename the argument to {best!r}.",
                    f"Given {best!r} as {name!r}, the same completions get {means[best]:.3g} on average, not"
                    f" {base.mean:.3g}.",
                )
            elif quiet_ and not base.spread.any() and not has_solution and (name in ANSWERS or not others):
                yield Finding(
                    "data-columns",
                    "error",
                    f"{function_name} asks for {name!r}, and no row has it; the rows have {', '.join(row)}.",
                    f"Add the column {name!r} to the dataset.",
                    f"All of {len(base.known)} completions get {base.mean:g}, whichever other column it is given.",
                )


def _reads(run: ExaminedRun, name: str) -> bool:
    """True if a function may take the column."""
    if not isinstance(run.base.samples[0].row[name], str | int | float | list | None):
        return False
    for _, function in _functions(run):
        parameters = parameters_of(function.function) or []
        if not parameters or name in {p.name for p in parameters} | _wanted(function):
            return True
    return False


def _constant(run: ExaminedRun, name: str) -> Iterator[Finding]:
    values = {str(row.get(name)) for row in run.taken}
    prompts = {prompt_text(row) for row in run.taken}
    empty = values <= {"None", "", "[]"}
    if len(values) > 1 or len(prompts) < 6 or not (empty or name in ANSWERS):
        return
    poor = run.base.signal(run.group) < 0.5
    samples = run.base.samples
    words = [(re.findall(r"\w+", completion_text(one.completion)) or ["x"])[-1] for one in run.base.rollouts]
    rows = [{**sample.row, name: word} for sample, word in zip(samples, words, strict=True)]
    totals = run.totals(rows, run.base.rollouts)
    changed = int(((totals - run.base.totals.flatten()).abs() > 1e-9).sum())
    yield Finding(
        "data-columns",
        "error" if poor and (changed or empty) else "warning",
        f"a reward reads the column {name!r}, which is {next(iter(values))!r} in each of {len(run.taken)} rows, whose"
        f" {len(prompts)} prompts differ.",
        f"Fill {name!r} with the value of each row.",
        f"With the last word of a completion in its place, {changed} of {len(samples)} rewards change.",
    )


def _instead(run: ExaminedRun, name: str) -> Iterator[Finding]:
    """Another column, which completions match, in place of one that gives no reward."""
    base, kept = run.base, run.failure
    low = base.known.min().item()
    if base.signal(run.group) > 0.2 or base.mean > low + 1e-9 or base.prompts < 2:
        return
    rows = [sample.row for sample in base.samples]
    means: dict[str, float] = {}
    for other in (other for other in rows[0] if other != name and other not in NOT_FORWARDED):
        if not run.has_time("data-columns"):
            return

        def gain(shift: int, other: str = other) -> float:
            cells = [rows[(n + shift * base.size) % len(rows)][other] for n in range(len(rows))]
            given = [{**row, name: cell} for row, cell in zip(rows, cells, strict=True)]
            return run.totals(given, base.rollouts).nan_to_num(low).mean().item() - low

        if gain(0) > max(1.5 * gain(1), 1.5 * gain(-1), 1e-9):
            means[other] = low + gain(0)
    run.failure = kept  # a function need not take what another column holds
    if not means:
        return
    best = max(means, key=lambda other: means[other])
    yield Finding(
        "data-columns",
        "error",
        f"a reward reads the column {name!r}, with which all of {len(base.known)} completions get {low:g}; the rows"
        f" have {', '.join(rows[0])}.",
        f"Let the function read {best!r}, or write `columns: {{{best}: {name}}}` and leave the other out.",
        f"With {best!r} in the place of {name!r} the same completions get {means[best]:.3g} on average, and less with"
        f" {best!r} of other rows.",
    )


def _of_other_rows(run: ExaminedRun, name: str) -> Iterator[Finding]:
    """Rewards of the same completions with the column of neighbouring, reversed and any other rows."""
    base, rows = run.base, run.rows
    if not hasattr(rows, "__len__") or len(rows) < 8 or len({str(row.get(name)) for row in run.taken}) < 2:
        return
    if any(turned(run)):
        return  # wrong answers get more, those of other rows as well
    own, count = base.mean, len(rows)
    places = {sample.prompt for sample in base.samples}

    def paired(shift: int, sign: int = 1) -> torch.Tensor:
        cells = {n: rows[(shift + sign * n) % count][name] for n in places}
        given = [{**sample.row, name: cells[sample.prompt]} for sample in base.samples]
        return run.totals(given, base.rollouts)

    totals = {f"of the row {abs(s)} {'after' if s > 0 else 'before'}": paired(s) for s in SHIFTS}
    totals["of the reversed dataset"] = paired(count - 1, -1)
    scored = {way: found.nanmean().item() for way, found in totals.items()}
    way = max(scored, key=lambda one: scored[one])
    others = sorted(scored.values())[len(scored) // 2]
    range_ = max((base.known.max() - base.known.min()).item(), abs(scored[way] - own))
    changed = int(((totals[way] - base.totals.flatten()).abs() > 0.01 * range_).sum())
    better = scored[way] - max(own, others) > 0.2 * range_ and changed > 0.2 * len(base.samples)
    if range_ and better and _is_above(totals[way].view_as(base.totals), base.totals):
        yield Finding(
            "data-columns",
            "error",
            f"the column {name!r} belongs to other rows: with its own the mean reward is {own:.3g}.",
            f"Make the dataset so that {name!r} is of the same row as the prompt; now it is that {way}.",
            f"With {name!r} {way}, the mean reward of the same completions is {scored[way]:.3g}.",
        )
        return
    if all(value == own for value in scored.values()) or _is_paired(run, name):
        return
    if (shifted := _shifted(run, name)) is not None:
        yield shifted
        return
    texts = {str(row.get(name)) for row in run.taken}
    if len(texts) < 8:
        if (other := _of_other_classes(run, name, sorted(texts))) is not None:
            yield other
        return
    if not all(isinstance(row.get(name), str | int | float) for row in run.taken):
        return
    fits, sure = _fit(run, name)
    hits = int((base.known > base.known.min()).sum())
    if fits > 1.2 or hits < 4:
        return
    yield Finding(
        "data-columns",
        "error" if sure > 2.2 and fits < 1 and own < 0.35 * max(range_, 1e-9) else "warning",
        f"completions get {own:.3g} on average with {name!r} of their own row, and {others:.3g} with any other:"
        " the column does not seem to belong to the prompts.",
        f"Look at a few rows: does {name!r} fit the prompt? Sort or shuffle whole rows, not single columns.",
        f"The model finds {name!r} of the own row {fits:.1f} deviations more probable than others; where they belong"
        " together it is 2 and more.",
    )


def _is_above(other: torch.Tensor, own: torch.Tensor) -> bool:
    """True if rewards [P, G] are higher than others in prompt after prompt, by more than two standard errors."""
    gains = (other - own).nanmean(1)
    gains = gains[~gains.isnan()]
    return len(gains) > 1 and bool(gains.mean() > 2 * gains.std() / len(gains) ** 0.5)


def _shifted(run: ExaminedRun, name: str) -> Finding | None:
    """Answers that the model finds most probable after the prompt of a neighbouring row, and not after their own."""
    count = len(run.rows)
    block = min(BLOCK, count - 2 * FAR)
    values = [dict(run.rows[number]).get(name) for number in range(block + 2 * FAR)] if block >= 8 else []
    if not values or not all(isinstance(one, str | int | float) for one in values) or not run.has_time("data-columns"):
        return None
    prompts = [run.codec.read_row(dict(run.rows[number])).ids for number in range(FAR, FAR + block)]
    answers = [list(run.tokenizer(str(one), add_special_tokens=False)["input_ids"]) for one in values]
    ways = range(-FAR, FAR + 1)
    if not all(answers):
        return None
    found = run.likelihoods([(prompt, answers[n + FAR + way]) for n, prompt in enumerate(prompts) for way in ways])
    table = torch.tensor(found).view(block, len(ways))  # of prompt n the answer of row n + way
    table = table - table.mean(1, keepdim=True)
    places = torch.arange(block)[:, None] + torch.arange(len(ways))
    sums = torch.zeros(len(values)).scatter_add(0, places.flatten(), table.flatten())
    times = torch.zeros(len(values)).scatter_add(0, places.flatten(), torch.ones(table.numel()))
    table = table - (sums / times)[places]  # without what an answer is worth after any prompt
    errors = table.std(0).clamp(min=1e-6) / block**0.5
    sure = (table.mean(0) / errors).tolist()
    best = max(range(len(ways)), key=lambda place: sure[place])
    if ways[best] == 0 or sure[best] < SURE or sure[best] < sure[FAR] + SURE:
        return None
    where = f"{abs(ways[best])} {'after' if ways[best] > 0 else 'before'}"
    return Finding(
        "data-columns",
        "error",
        f"the column {name!r} belongs to other rows: after a prompt the model expects the value of the row {where}, and"
        f" its own value no more than any other ({sure[best]:.1f} and {sure[FAR]:.1f} standard errors above the mean).",
        f"Make the dataset so that {name!r} is of the same row as the prompt; now it is of the row {where}.",
        f"By the probabilities of {len(ways)} answers after each of {block} prompts.",
    )


def _of_other_classes(run: ExaminedRun, name: str, classes: Sequence[str]) -> Finding | None:
    """Few different answers, one of which the model clearly prefers after each prompt, and by chance the row's."""
    rows = run.taken[:: max(1, len(run.taken) // CLASSED)][:CLASSED]
    answers = [list(run.tokenizer(one, add_special_tokens=False)["input_ids"]) for one in classes]
    if len(rows) < CLASSED // 2 or len(classes) < 3 or not all(answers) or not run.has_time("data-columns"):
        return None
    prompts = [run.codec.read_row(row).ids for row in rows]
    found = run.likelihoods([(prompt, answer) for prompt in prompts for answer in answers])
    lengths = torch.tensor([float(len(answer)) for answer in answers])
    table = torch.tensor(found).view(len(rows), len(classes)) * lengths  # log-prob of each whole answer
    shares = (table - table.mean(0)).softmax(1)  # without what an answer is worth after any prompt
    highest, preferred = shares.max(1)
    sure = highest.mean().item()
    own = torch.tensor([classes.index(str(row[name])) for row in rows])
    chosen, held = (torch.bincount(one, minlength=len(classes)).double() / len(rows) for one in (preferred, own))
    hits, chance = int((preferred == own).sum()), float((chosen * held).sum()) * len(rows)
    if sure < CLEAR or chosen.max() > MOST_OF or hits > chance + (chance * (1 - chance / len(rows))) ** 0.5:
        return None
    return Finding(
        "data-columns",
        "warning",
        f"the column {name!r} does not seem to belong to the prompts: the model clearly prefers one of {len(classes)}"
        f" answers after each of {len(rows)} prompts, and that is the row's own in {hits}, as chance would have it"
        f" ({chance:.1f}).",
        f"Look at a few rows: does {name!r} fit the prompt? Sort or shuffle whole rows, not single columns. Where it"
        " does fit, the model knows nothing of the task yet.",
        f"The preferred answer has {sure:.0%} of the probability of all {len(classes)} on average; none is preferred"
        f" more than {chosen.max().item():.0%} of the time.",
    )


def _is_paired(run: ExaminedRun, name: str) -> bool:
    """True if completions get more with the column of their own row than with the columns of other prompts."""
    base = run.base
    own, size, rows = base.totals, base.size, [sample.row for sample in base.samples]
    others = []
    for step in range(1, base.prompts):
        cells = [rows[(n + step * size) % len(rows)][name] for n in range(len(rows))]
        given = [{**row, name: cell} for row, cell in zip(rows, cells, strict=True)]
        others.append(run.totals(given, base.rollouts).view_as(own))
    if not others:
        return True
    margin = own.nanmean(1) - torch.stack(others).nanmean((0, 2))  # [P]
    return bool(margin.nanmean() > 2 * margin.std() / len(margin) ** 0.5 + 1e-9)


def _fit(run: ExaminedRun, name: str) -> tuple[float, float]:
    """Deviations by which answers are more probable after their own prompt than after others; and the largest.

    From log-probabilities of each answer after each prompt, without the means of prompts and of answers.
    """
    rows: Sequence[dict[str, Any]] = run.taken[:: max(1, len(run.taken) // CANDIDATES)][:CANDIDATES]
    prompts = [run.codec.read_row(row).ids for row in rows]
    answers = [run.tokenizer(str(row[name]), add_special_tokens=False)["input_ids"] for row in rows]
    if not all(answers):
        return 2.0, 0.0
    found = run.likelihoods([(prompt, list(answer)) for prompt in prompts for answer in answers])
    matrix = torch.tensor(found).view(len(rows), len(rows))
    matrix = matrix - matrix.mean(1, keepdim=True)
    matrix = matrix - matrix.mean(0, keepdim=True)
    own = matrix.diagonal()
    rest = matrix[~torch.eye(len(rows), dtype=torch.bool)]
    deviation = rest.std().clamp(min=1e-6)
    return (own.mean() * len(rows) ** 0.5 / deviation).item(), (matrix.amax(1) / deviation).mean().item()
