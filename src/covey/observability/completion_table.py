"""Table of completions on a console."""

import json
from textwrap import dedent
from typing import Any

from covey.core.transcript import Entry, Kind, entries, excerpt, is_conversation, shorten

MAX_REWARD_COLUMNS = 3
"""With more reward functions than this, their values share one column."""

PROMPT_CHARACTERS = 200
COMPLETION_CHARACTERS = 400
CONVERSATION_CHARACTERS = 600
"""Shown of a completion that has several messages or calls a tool."""

ERROR_CHARACTERS = 120

INDENT = 2
"""Columns before calls and results, also where their lines are wrapped."""

STYLES = {Kind.CALL: "cyan", Kind.RESULT: "dim", Kind.FAILURE: "red", Kind.GAP: "dim italic"}


def completion_table(rows: list[dict[str, Any]], reward_names: list[str], num: int | None = None) -> Any:
    """A `rich.table.Table` of all rows, or `num` of them evenly spread, that is readable in 100 columns."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    shown = _spread(rows, num)
    steps = sorted({row["step"] for row in shown})
    when = f", step {steps[0]}" if len(steps) == 1 else f", steps {steps[0]} to {steps[-1]}" if steps else ""
    count = f"{len(shown)} of {len(rows)} completions" if len(shown) < len(rows) else f"{len(rows)} completions"
    table = Table(title=count + when, box=box.SIMPLE_HEAD, title_justify="left", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    separate = len(reward_names) <= MAX_REWARD_COLUMNS
    for name in reward_names if separate else ["rewards"]:
        wide = 9 if separate else 22
        table.add_column(_header(name), justify="right" if separate else "left", width=wide, overflow="fold")
    table.add_column("advantage", justify="right", width=9)
    for row in shown:
        values = [_number(row.get(name)) for name in reward_names]
        listed = "\n".join(f"{shorten(name, 15)} {value}" for name, value in zip(reward_names, values, strict=True))
        ending = "" if row.get("finish") in (None, "stop") else f" [{_ending(row)}]"
        table.add_row(
            Text(_images(row) + shorten(row["prompt"], PROMPT_CHARACTERS)),
            _completion(row, Text(ending, style="yellow")),
            *(values if separate else [escape(listed)]),
            Text(_number(row["advantage"], signed=True), style=_colour(row["advantage"])),
        )
    return table


def _images(row: dict[str, Any]) -> str:
    """Number of images of a prompt whose text has no placeholders for them."""
    count = 0 if "<image>" in row["prompt"] else len(row.get("images") or ())
    return f"[{count} image{'s' if count > 1 else ''}] " if count else ""


def _ending(row: dict[str, Any]) -> str:
    error = row.get("error")
    return f"{row['finish']}: {shorten(error, ERROR_CHARACTERS)}" if error else str(row["finish"])


def _completion(row: dict[str, Any], ending: Any) -> Any:
    """A completion, or an excerpt of a conversation, as a renderable."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    messages = json.loads(row.get("messages") or "[]")
    if not is_conversation(messages):
        return Text(shorten(row["completion"], COMPLETION_CHARACTERS)) + ending
    shown = excerpt(entries(messages), CONVERSATION_CHARACTERS)
    texts = [_styled(entry) for entry in shown]
    texts[-1] += ending
    indents = [0 if entry.kind is Kind.MESSAGE else INDENT for entry in shown]
    return Group(*(Padding(text, (0, 0, 0, indent)) for text, indent in zip(texts, indents, strict=True)))


def _styled(entry: Entry) -> Any:
    """An entry in its colour; in a message, only the role is bold."""
    from rich.text import Text

    if entry.kind is not Kind.MESSAGE:
        return Text(dedent(entry.text), style=STYLES[entry.kind])
    who, colon, what = entry.text.partition(":")
    return Text.assemble((who + colon, "bold"), what)


def _spread(rows: list[Any], num: int | None) -> list[Any]:
    if num is None or num >= len(rows):
        return rows
    return [rows[index * len(rows) // num] for index in range(num)]


def _header(name: str) -> str:
    """A reward function's name that wraps between its words."""
    from rich.markup import escape

    return escape(name.removesuffix("_reward").replace("_", " "))


def _number(value: float | None, signed: bool = False) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:+.2f}" if signed and value else f"{value:.2f}"


def _colour(advantage: float) -> str:
    return "green" if advantage > 0 else "red" if advantage < 0 else "dim"
