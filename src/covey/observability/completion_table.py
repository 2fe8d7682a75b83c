"""How completions look on a console."""

from typing import Any

from covey.observability.text import shorten

MAX_REWARD_COLUMNS = 3
"""With more reward functions than this, their values share one column."""

PROMPT_CHARACTERS = 200
COMPLETION_CHARACTERS = 400


def completion_table(rows: list[dict[str, Any]], reward_names: list[str], num: int | None = None) -> Any:
    """A `rich.table.Table` that is readable in 100 columns.

    Args:
        rows: with `step`, `prompt`, `completion`, `advantage` and the rewards.
        reward_names: keys of the rewards.
        num: show this many, evenly spread; all if None.
    """
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
        ending = "" if row.get("finish") in (None, "stop") else f" [{row['finish']}]"
        table.add_row(
            Text(shorten(row["prompt"], PROMPT_CHARACTERS)),
            Text(shorten(row["completion"], COMPLETION_CHARACTERS)) + Text(ending, style="yellow"),
            *(values if separate else [escape(listed)]),
            Text(_number(row["advantage"], signed=True), style=_colour(row["advantage"])),
        )
    return table


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
