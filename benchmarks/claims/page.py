"""docs/claims.md from the records: the table of verdicts, and for each claim what was fixed and what was found."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bands import draw_bands
from benchmarks.claims.claim import (
    PILOT,
    Answer,
    AnyPart,
    Claim,
    Count,
    Enumerated,
    Part,
    Shares,
    answers,
    failed_conditions,
    verdict_of,
)
from benchmarks.claims.measures import running
from benchmarks.claims.records import ClaimRecords
from benchmarks.claims.simulation import summary
from benchmarks.claims.table import CLAIMS, NOT_TESTED

NOT_RUN = "not run yet"
PICTURES = "claims"


@dataclass(frozen=True)
class Standing:
    """Where a claim stands: its verdict (None: not all parts have run), the answers, and failed preconditions."""

    verdict: str | None
    parts: tuple[Answer, ...]
    failed: tuple[str, ...]


def standing(claim: Claim, records: ClaimRecords) -> Standing:
    runs = records.runs(claim)
    parts = answers(claim, runs, records.enumerated(claim))
    failed = failed_conditions(claim, runs)
    return Standing(verdict_of(claim, parts, failed), tuple(parts), tuple(failed))


def short(claim: Claim, records: ClaimRecords) -> str:
    """Verdict in words: of the whole claim, or of its parts where some have not run."""
    now = standing(claim, records)
    exact = all(isinstance(one, Enumerated) for one in claim.parts)
    if now.verdict is not None and not claim.missing:
        acts = " (the mechanism does not act here)" if now.failed else " (exact)" if exact else ""
        return f"*{now.verdict}*{acts}"
    rest = "cannot run yet" if claim.missing else NOT_RUN
    words = [
        f"{one.part.name}: *{one.verdict}*{' (exact)' if isinstance(one.part, Enumerated) else ''}"
        for one in now.parts
        if one.verdict is not None
    ]
    return "; ".join([*words, f"the rest: {rest}"]) if words else rest


def line(claim: Claim, records: ClaimRecords) -> str:
    """One line for the terminal."""
    found = "; ".join(f"{one.part.name}: {one.sentence}" for one in standing(claim, records).parts)
    return f"claim {claim.number}, {claim.statement}: {short(claim, records)}. {found}"


INTRODUCTION = """# Claims

This page tests, on small models, published claims about the methods in Covey. 135 million parameters and 16 steps can
show a mechanism and its sign, not its size at 32 billion. Each claim is a protocol that was fixed before its first run,
with arms, a statistic and preconditions. Its verdict follows by a rule from the records in
[`benchmarks/claims.jsonl`](../benchmarks/claims.jsonl).

**What such a model can show.** That an effect of at least {delta} of reward exists, and its sign, on tasks of one
to three tokens or with a random model of two layers; and, exactly, that a formula has the gradient that is claimed
for it. **What it cannot show.** That an effect is absent at other sizes, on long completions or after thousands of
steps. A small model refutes no paper about large ones.

**Verdicts** are *holds*, *does not hold here* and *undecided*. A verdict compares the confidence interval of a
paired difference D (same prompts, same order, same random numbers) over seeds and prompts with δ, the smallest
difference that is called an effect:

| kind | holds | does not hold here |
|---|---|---|
| superiority, D > 0 | interval above 0 | interval below δ |
| non-inferiority, D > -δ | interval above -δ | mean below -δ, and interval below 0 |
| equivalence, -δ < D < δ | interval within | mean beyond, and interval on one side of 0 |
| difference, D ≠ 0 | interval on one side of 0 | interval within -δ and δ |

If a claim has several parts, the weakest verdict decides. An undecided claim is run once more, with as many further
seeds. The interval before and the interval after are both at 97.5%; figures on this page show 95%. Where a
precondition fails, the mechanism does not act here: the claim is undecided, and further seeds would not change it.

**False verdicts to expect.** The verdict of a part is wrong in at most about 5%: of the {planned} parts with an
interval on this page {expected} would be wrong. Parts that have run so far: {counted}. Enumerations are exact.

**The interval** treats seeds and prompts as samples: a two-way table with Satterthwaite's degrees of freedom. The
first plan, the wider one of a bootstrap over seeds and prompts and Student's t over seeds, was replaced before any
run: the bootstrap counts the noise of single completions three times, so that real effects would stay undecided.
{simulated}

Each claim is repeated by `python -m benchmarks.claims N`, and this page by `python -m benchmarks.claims --summary`.
"""


def render(records: ClaimRecords) -> str:
    """The page."""
    shown = [(claim, standing(claim, records)) for claim in CLAIMS]
    counted = sum(one.interval is not None for _, now in shown for one in now.parts)
    planned = sum(isinstance(part, Part) for claim in CLAIMS for part in claim.parts)
    lines = [
        INTRODUCTION.format(
            delta=".05",
            counted=counted,
            planned=planned,
            expected=f"{0.05 * planned:.1f}",
            simulated=simulated_sentence(),
        ),
        "## Verdicts",
        "",
        "| | claim | verdict | figure | where | minutes |",
        "|---:|---|---|---|---|---:|",
    ]
    for claim, now in shown:
        figures = cell("; ".join(figure(one) for one in now.parts if one.verdict is not None)) or "–"
        where = claim.bed.name if claim.bed else "–" if claim.missing else "enumeration"
        minutes = f"{_minutes(claim, records):.0f} of {claim.minutes:g}" if claim.bed else "–"
        lines.append(
            f"| [{claim.number}](#claim-{claim.number}) | {claim.statement} ({claim.source}) |"
            f" {short(claim, records)} | {figures} | {where} | {minutes} |"
        )
    lines += [
        "",
        "Minutes are what the runs took on a machine with other work, of what was planned on two free cores. Nothing"
        " follows from them.",
        "",
    ]
    for claim, now in shown:
        lines += details(claim, now, records)
    lines += ["## Methods without a claim", ""]
    lines += [f"- `{method.replace('=', '` = `')}`: {because}." for method, because in NOT_TESTED.items()]
    return "\n".join(lines) + "\n"


def details(claim: Claim, now: Standing, records: ClaimRecords) -> list[str]:
    """Section of a claim."""
    lines = [
        f"## Claim {claim.number}",
        "",
        f"{claim.statement}: {claim.source}. Verdict: {short(claim, records)}.",
        "",
    ]
    if claim.missing:
        lines += [f"Cannot run yet: {claim.missing}", ""]
    if not claim.parts:
        return [*lines, f"Other reading: {claim.other_reading}", ""]
    lines += ["| part | hypothesis | kind, δ | found | verdict |", "|---|---|---|---|---|"]
    for one in now.parts:
        more = f"; about {one.more} seeds would decide" if one.more else ""
        lines.append(
            f"| {one.part.name} | {cell(one.part.hypothesis)} | {_kind(one.part)} | {cell(one.sentence)}{more} |"
            f" {one.verdict or NOT_RUN} |"
        )
    enumerated = records.enumerated(claim)
    for note in claim.notes:
        found = enumerated[note.name].sentence if note.name in enumerated else NOT_RUN
        lines.append(f"| {note.name} | {cell(note.hypothesis)} | exact, decides nothing | {cell(found)} | |")
    lines.append("")
    if claim.bed is not None:
        arms = "; ".join(f"{name}: {_settings(changes)}" for name, changes in (claim.arms or {}).items())
        lines += [f"- Arms: {arms}. {claim.seeds} seed{'s' * (claim.seeds > 1)}, {claim.bed.name}."]
        lines += [f"- Precondition: {one.text}." for one in claim.conditions]
        lines += [f"- Precondition failed: {one}." for one in now.failed]
    lines += [f"- Changed before the first run: {claim.changed}"] if claim.changed else []
    lines += [f"- Other reading: {claim.other_reading}"]
    lines += [f"- Seen in the runs, after the verdict: {claim.seen}"] if claim.seen else []
    lines += [
        f"- Repeat: `python -m benchmarks.claims {claim.number}`; protocol `{claim.digest}`"
        f"{_provenance(claim, records)}."
    ]
    if superseded := records.superseded(claim):
        lines += [f"- {superseded} runs of earlier protocols are superseded and not used."]
    lines += ["", *arms_table(claim, records)]
    if picture_data(claim, records):
        lines += [f"![Claim {claim.number}: its arms by step]({PICTURES}/claim-{claim.number}.png)", ""]
    return lines


def arms_table(claim: Claim, records: ClaimRecords) -> list[str]:
    """Means over seeds of what the arms of a claim ended with."""
    runs = records.runs(claim)
    rows = []
    for arm in claim.arms or {}:
        own = [result for (name, seed), result in runs.items() if name == arm and seed != PILOT]
        if own:
            rows.append(f"| {arm} | {len(own)} | {'; '.join(_ended(own))} |")
    return ["| arm | seeds | mean over seeds |", "|---|---:|---|", *rows, ""] if rows else []


def _ended(results: Sequence[dict]) -> list[str]:
    if "evaluations" in results[0]:
        scores = [
            np.mean([np.mean(one["evaluations"][n][1]) for one in results])
            for n in range(len(results[0]["evaluations"]))
        ]
        steps = [step for step, _ in results[0]["evaluations"]]
        return [f"score {', '.join(f'{score:.3f}' for score in scores)} at step {', '.join(map(str, steps))}"]
    if "curves" in results[0]:
        found = []
        for name in results[0]["curves"]:
            ends = [np.mean([v for v in one["curves"][name][-5:] if v is not None] or [np.nan]) for one in results]
            starts = [next((v for v in one["curves"][name] if v is not None), np.nan) for one in results]
            if results[0]["curves"][name]:
                found.append(f"{name} {np.nanmean(starts):.2f} to {np.nanmean(ends):.2f}")
        return found
    if "differences" in results[0]:
        one = results[0]
        return [
            f"mean difference {np.mean(one['differences']):.2e} nats, largest {one['largest']:.2e},"
            f" {one['not finite']} of {one['tokens']} not finite"
        ]
    if "k3" in results[0]:
        one = results[0]
        return [
            f"mean k3 {np.mean(one['k3']):.2e}, {one['differing']:.1%} of the routes differ, {one['tokens']} tokens"
        ]
    return [f"{name} {', '.join(f'{value:.4g}' for value in values)}" for name, values in results[0].items()]


def picture_data(claim: Claim, records: ClaimRecords) -> dict[str, list[tuple[list[float], list[float]]]]:
    """For each arm the curves of its seeds, as x and y: values by step, or shares of completions by difference."""
    found: dict[str, list[tuple[list[float], list[float]]]] = {}
    for (arm, seed), result in records.runs(claim).items():
        if seed == PILOT:
            continue
        if "evaluations" in result:
            curve = [step for step, _ in result["evaluations"]], [float(np.mean(r)) for _, r in result["evaluations"]]
        elif "curves" in result:
            name = shown_curve(result)
            values = [np.nan if value is None else value for value in result["curves"][name]]
            curve = list(range(1, len(values) + 1)), running(values, 5)
        elif "differences" in result or "k3" in result:
            ordered = sorted(result.get("differences") or result["k3"])
            curve = ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]
        else:
            curve = list(range(1, len(result["unchanged"]) + 1)), result["unchanged"]
        found.setdefault(arm, []).append(curve)
    return found


def shown_curve(result: Mapping[str, Any]) -> str:
    """Curve of a tiny model's run that its picture shows."""
    return next(name for name in ("wrong length", "against a coin", "accuracy") if result["curves"].get(name))


def draw(claim: Claim, records: ClaimRecords, path: Path) -> None:
    """Curves of a claim's arms: mean over seeds, and a band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
    draw_bands(axes, picture_data(claim, records))
    result = next(iter(records.runs(claim).values()))
    labels = {"xlabel": "optimizer steps", "ylabel": "mean held-out reward"}
    if "curves" in result:
        labels["ylabel"] = shown_curve(result)
    elif "differences" in result:
        labels = {"xlabel": "mean difference of a completion (nats)", "ylabel": "share of completions", "xscale": "log"}
    elif "k3" in result:
        labels = {"xlabel": "mean k3 of a completion (nats)", "ylabel": "share of completions", "xscale": "log"}
    elif "unchanged" in result:
        labels["ylabel"] = "share of weights that stay as they were"
    axes.set(**labels)
    axes.legend(title="arm (seeds)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(drawing)


VERDICT_ELSEWHERE = re.compile(r"(\[claim (\d+)\]\(claims\.md#claim-\d+\): )([^.|\n]*)")
"""A line such as "[claim 4](claims.md#claim-4): *holds*" in the docs of a method."""


def with_verdicts(text: str, records: ClaimRecords) -> str:
    """A page whose lines about claims say where they stand now."""
    by_number = {str(claim.number): claim for claim in CLAIMS}
    return VERDICT_ELSEWHERE.sub(lambda found: found[1] + short(by_number[found[2]], records), text)


def write(records: ClaimRecords, root: Path) -> None:
    """Write docs/claims.md, its pictures, and the verdicts on other pages."""
    (root / "docs" / "claims.md").write_text(render(records))
    for claim in CLAIMS:
        if picture_data(claim, records):
            draw(claim, records, root / "docs" / PICTURES / f"claim-{claim.number}.png")
    for path in (root / "docs").glob("*.md"):
        if VERDICT_ELSEWHERE.search(text := path.read_text()):
            path.write_text(with_verdicts(text, records))


def simulated_sentence() -> str:
    return "\n".join(textwrap.wrap(summary(), 118))


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def _kind(part: AnyPart) -> str:
    if isinstance(part, Enumerated):
        return "exact"
    if isinstance(part, Count):
        return "count of seeds"
    if isinstance(part, Shares):
        return "shares of seeds"
    return f"{part.kind}, {part.delta:.3g}"


def figure(one: Answer) -> str:
    if isinstance(one.part, Enumerated):
        return f"{one.part.name}: exact"
    return f"{one.part.name}: {one.sentence}"


def _settings(changes) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in changes.items()) or "as fixed"


def _minutes(claim: Claim, records: ClaimRecords) -> float:
    return sum(one["seconds"] for one in records.of(claim)) / 60


def _provenance(claim: Claim, records: ClaimRecords) -> str:
    lines = [one for one in records.of(claim) if "arm" in one] or records.of(claim)
    if not lines:
        return ""
    last = lines[-1]
    commits = sorted({one["commit"] for one in lines})
    machine = last["machine"]
    loads = [one["load"] for one in lines]
    return (
        f"; commit {', '.join(f'`{commit}`' for commit in commits)}, {machine['date']}, {machine['cores']} cores of"
        f" {machine['processor']}, threads: {machine['threads']}, torch {machine['versions']['torch']}, load"
        f" {min(loads):g} to {max(loads):g}"
    )
