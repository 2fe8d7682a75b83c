"""A run as one HTML page that stands alone, without scripts; every text from a run is escaped."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from covey.core.transcript import as_text, entries, excerpt, is_conversation, shorten
from covey.observability.evaluations import all_sets, prefix
from covey.observability.metric_docs import meaning
from covey.observability.plots import series

MAX_PROMPT, MAX_COMPLETION = 1200, 3000  # characters shown of a prompt and of a completion


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
    figures: Sequence[str | Path] = (),  # PNG files to embed
    before: Sequence[Sample] = (),  # next to those of `after`, in pairs
    after: Sequence[Sample] = (),
    summary: Mapping[str, Any] | None = None,  # key figures by label
    advice: Sequence[str] = (),  # sentences above all else
) -> Path:
    """Write the page; its folder is created."""
    sections = [
        "".join(f'<p class="advice">{_text(sentence)}</p>\n' for sentence in advice),
        _key_figures(summary or {}),
        "".join(_figure(Path(figure)) for figure in figures),
        _samples(list(before), list(after)),
        _metrics(log_history),
        _settings(config),
    ]
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_text(title)}</h1>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _key_figures(summary: Mapping[str, Any]) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{_text(label)}</dt><dd>{_text(_value(value))}</dd></div>'
        for label, value in summary.items()
    )
    return f'<dl class="tiles">{tiles}</dl>\n' if tiles else ""


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    heading = "The latest rollout batch over time" if path.stem == "timeline" else "Curves"
    return (
        f'<section><h2>{heading}</h2><img alt="{heading} from {_text(path.name)}" '
        f'src="data:image/png;base64,{data}"></section>\n'
    )


def _samples(before: list[Sample], after: list[Sample]) -> str:
    if not before and not after:
        return ""
    rows = []
    for first, last in zip_longest(before, after):
        shared = first is not None and last is not None and as_text(first.prompt) == as_text(last.prompt)
        shared = shared and list(first.images) == list(last.images)
        prompt = _prompt(first) if shared else ""
        cards = _card(first, "before", not shared) + _card(last, "after", not shared)
        rows.append(f'<article>{prompt}<div class="pair">{cards}</div></article>')
    return f"<section><h2>Completions before and after</h2>{''.join(rows)}</section>\n"


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
    names = {key for entry in log_history for key in entry} - {"step"}
    sets = all_sets(log_history)
    rows = []
    explained: set[str] = set()
    for name in sorted(names):
        if "reward/" in name and name.replace("reward/", "rewards/", 1) in names:
            continue  # the same value under its other spelling
        values = series(log_history, name)[1]
        if values:
            shown = (values[0], values[-1], min(values), max(values))
            numbers = "".join(f"<td>{_value(value)}</td>" for value in shown)
            text = _meaning(name, sets)
            again = name.startswith("phase/") and text in explained
            explained.add(text)
            rows.append(f"<tr><th>{_text(name)}</th>{numbers}<td>{_text('as above' if again else text)}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>lowest</th><th>highest</th><th>meaning</th></tr>"
    return (
        f'<section><h2>Metrics</h2><div class="scroll"><table class="metrics"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


def _meaning(name: str, sets: list[str]) -> str:
    start = next((prefix(one) for one in sets if one and name.startswith(prefix(one))), "")
    return meaning(name.removeprefix(start)) or ""


def _settings(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(_value(value))}</td></tr>" for name, value in config.items())
    return (
        f"<section><details><summary>Settings ({len(config)})</summary>"
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


CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #66727f; --paper: #ffffff; --card: #f5f7f9;
  --line: #dfe4ea; --accent: #2563eb; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --faint: #93a0ad; --paper: #14181d; --card: #1d232a; --line: #303943;
    --accent: #7aa7ff; --bad: #ff8a7a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem; }
.advice { border-left: 4px solid #d97706; background: var(--card); padding: .7rem .9rem; margin: 0 0 .75rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; margin: 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }
.tile dt { color: var(--faint); font-size: .85rem; }
.tile dd { margin: 0; font-size: 1.35rem; font-weight: 600; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
article { margin: 0 0 1.25rem; }
.prompt { color: var(--faint); white-space: pre-wrap; overflow-wrap: anywhere; font-size: .95rem; margin: 0 0 .4rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; }
@media (max-width: 44rem) { .pair { grid-template-columns: 1fr; } }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem;
  min-width: 0; }
.card.empty { background: none; border-style: dashed; }
.card header { display: flex; flex-wrap: wrap; gap: .75rem; font-size: .85rem; color: var(--faint);
  margin-bottom: .35rem; }
.when { font-weight: 600; color: var(--accent); }
.reward { font-variant-numeric: tabular-nums; color: var(--ink); }
.faint { color: var(--faint); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .9rem/1.45 ui-monospace, monospace; }
.shown { max-width: 8rem; max-height: 8rem; margin: 0 .5rem .3rem 0; vertical-align: top; }
.call { color: var(--accent); }
.result, .gap { color: var(--faint); }
.failure { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 500; }
thead th { color: var(--faint); }
tbody th { font-family: ui-monospace, monospace; font-size: .82rem; }
.metrics td { font-variant-numeric: tabular-nums; }
.metrics td:not(:last-child) { white-space: nowrap; }
.metrics td:last-child { color: var(--faint); min-width: 18rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 2.5rem; }
"""
