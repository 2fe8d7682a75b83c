"""A run as one HTML page that stands alone, without scripts; every text from a run is escaped."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from covey.core.transcript import as_text, entries, is_conversation
from covey.observability.excerpts import excerpt
from covey.observability.metric_docs import all_sets, meaning, place, prefix
from covey.observability.metrics import Timeline
from covey.observability.plots import as_svg, draw_panel, drawn_panels, series
from covey.observability.timeline import draw_timeline
from covey.runtime.files import written_whole
from covey.runtime.safe_text import shorten

MAX_PROMPT, MAX_COMPLETION = 1200, 3000  # characters shown of a prompt and of a completion
NOT_NUMBERS = ("step", "error", "turns", "calls")  # columns of a group that its table leaves out
PAGE = Path(__file__).with_name("report.html")
STYLE = Path(__file__).with_name("report.css")


@dataclass(frozen=True)
class Sample:
    """One completion to show; it and its prompt are text or messages."""

    prompt: Any
    completion: Any
    reward: float | None = None  # in total
    note: str = ""  # a word about it, such as why it ended
    images: Sequence[bytes] = ()  # PNG files of what a vision-language model was shown


def write_report(
    path: str | Path,
    *,
    title: str,
    config: Mapping[str, Any],
    log_history: list[dict[str, Any]],
    timeline: Timeline | None = None,
    before: Sequence[Sample] = (),  # next to those of `after`, in pairs
    after: Sequence[Sample] = (),
    summary: Mapping[str, Any] | None = None,  # key figures by label
    advice: Sequence[str] = (),  # sentences above all else
    group: Sequence[Mapping[str, Any]] = (),  # rows of a completions table: one prompt's, with their `reward`
    provenance: Mapping[str, Any] | None = None,  # command, versions, ... by name
) -> Path:
    """Write the page; its folder is created."""
    lanes = draw_timeline(timeline) if timeline is not None else None
    sections = [
        "".join(f'<p class="advice">{_text(sentence)}</p>\n' for sentence in advice),
        _key_figures(summary or {}),
        figures("Curves", [as_svg(draw_panel(log_history, panel)) for panel in drawn_panels(log_history)]),
        _samples(list(before), list(after)),
        _group(group),
        figures("The latest rollout batch over time", [as_svg(lanes)] if lanes else []),
        _metrics(log_history),
        _settings("Settings", config),
        _settings("Provenance", provenance or {}, is_open="open"),
    ]
    return write_page(path, title, sections)


def page_of(title: str, sections: Sequence[str]) -> str:
    """A page of sections, which are HTML."""
    return PAGE.read_text().format(title=_text(title), style=STYLE.read_text(), sections="".join(sections))


def write_page(path: str | Path, title: str, sections: Sequence[str]) -> Path:
    """Write a page of sections, which are HTML."""
    with written_whole(path := Path(path)) as new:  # a command may hold half a character
        new.write_bytes(page_of(title, sections).encode("utf-8", "backslashreplace"))
    return path


def _key_figures(summary: Mapping[str, Any]) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{_text(label)}</dt><dd>{_text(_value(value))}</dd></div>'
        for label, value in summary.items()
    )
    return f'<dl class="tiles">{tiles}</dl>\n' if tiles else ""


def figures(heading: str, drawn: list[str]) -> str:
    return f'<section><h2>{heading}</h2><div class="panels">{"".join(drawn)}</div></section>\n' if drawn else ""


def _samples(before: list[Sample], after: list[Sample]) -> str:
    if not before and not after:
        return ""
    rows = []
    for first, last in zip_longest(before, after):
        shared = first is not None and last is not None and as_text(first.prompt) == as_text(last.prompt)
        shared = shared and list(first.images) == list(last.images)
        prompt = _prompt(first) if shared else ""
        cards = _card(first, "before", not shared) if before else ""
        cards += _card(last, "after" if before else "", not shared)
        rows.append(f'<article>{prompt}<div class="pair">{cards}</div></article>')
    heading = "Completions before and after" if before else "Latest completions"
    return f"<section><h2>{heading}</h2>{''.join(rows)}</section>\n"


def _group(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of one prompt's completions, with their rewards and advantages."""
    if not rows:
        return ""
    names = [name for name in rows[0] if name not in NOT_NUMBERS]
    numbers = [name for name in names if all(isinstance(row[name], int | float | None) for row in rows)]
    head = "".join(f"<th>{_text(name)}</th>" for name in (*numbers, "completion"))
    body = "".join(
        "<tr>"
        + "".join(f"<td>{'' if row[name] is None else _value(row[name])}</td>" for name in numbers)
        + f"<td><pre>{_long(row['completion'], MAX_PROMPT)}</pre></td></tr>"
        for row in rows
    )
    return (
        f'<section><h2>One whole group</h2><div class="prompt">{_long(rows[0]["prompt"], MAX_PROMPT)}</div>'
        f'<div class="scroll"><table class="metrics"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</section>\n"
    )


def _card(sample: Sample | None, when: str, with_prompt: bool) -> str:
    if sample is None:
        return '<div class="card empty"></div>'
    prompt = _prompt(sample) if with_prompt else ""
    reward = "" if sample.reward is None else f'<span class="reward">reward {_text(_value(sample.reward))}</span>'
    note = f"<span>{_text(sample.note)}</span>" if sample.note else ""
    completion = _completion(sample.completion) or '<span class="faint">(empty)</span>'
    return (
        f'<div class="card"><header><span class="when">{when}</span>{reward}{note}</header>{prompt}'
        f"<pre>{completion}</pre></div>"
    )


def _prompt(sample: Sample) -> str:
    start = '<img class="shown" alt="what the model was shown" src="data:image/png;base64,'
    pictures = "".join(f'{start}{base64.b64encode(one).decode()}">' for one in sample.images)
    return f'<div class="prompt">{pictures}{_long(sample.prompt, MAX_PROMPT)}</div>'


def _completion(completion: Any) -> str:
    if not is_conversation(completion):
        return _long(completion, MAX_COMPLETION)
    shown = excerpt(entries(completion), MAX_COMPLETION)
    return "\n".join(f'<span class="{entry.kind}">{_text(entry.text)}</span>' for entry in shown)


def _metrics(log_history: list[dict[str, Any]]) -> str:
    """A table of all metrics: of training before evaluations, each in the order of docs/metrics.md, one's own last."""
    names = {key for entry in log_history for key in entry} - {"step"}
    starts = sorted(map(prefix, all_sets(log_history)), key=len, reverse=True)  # `eval_` begins the others, too
    base = {name: name.removeprefix(next(filter(name.startswith, starts), "")) for name in names}
    rows, zeros = [], []
    explained: set[str] = set()
    for name in sorted(names, key=lambda name: (base[name] != name, place(base[name]), name)):
        if "reward/" in name and name.replace("reward/", "rewards/", 1) in names:
            continue  # the same value under its other spelling
        values = series(log_history, name)[1]
        if values and not any(values):
            zeros.append(_text(name))
        elif values:
            shown = (values[0], values[-1], min(values), max(values))
            numbers = "".join(f"<td>{_value(value)}</td>" for value in shown)
            text = meaning(base[name]) or ""
            again = name.startswith("phase/") and text in explained
            explained.add(text)
            rows.append(f"<tr><th>{_text(name)}</th>{numbers}<td>{_text('as above' if again else text)}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>lowest</th><th>highest</th><th>meaning</th></tr>"
    rest = f'<p class="faint">0 in all logs: {", ".join(zeros)}.</p>' if zeros else ""
    return (
        f'<section><h2>Metrics</h2><div class="scroll"><table class="metrics named"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{rest}</section>\n"
    )


def _settings(heading: str, values: Mapping[str, Any], is_open: str = "") -> str:
    if not values:
        return ""
    shown = {name: ", ".join(map(str, one)) if isinstance(one, list) else one for name, one in values.items()}
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in shown.items())
    return (
        f"<section><details {is_open}><summary>{heading} ({len(values)})</summary>"
        f'<div class="scroll"><table>{rows}</table></div></details></section>\n'
    )


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _long(value: Any, width: int) -> str:
    return _text(shorten(as_text(value), width))


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
