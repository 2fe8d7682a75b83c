"""Rendering of a run's progress on a terminal: bar, sparkline, metrics, time by phase."""

import math

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"

PHASE_COLOURS = {
    "generate": "cyan",
    "reward": "magenta",
    "score": "yellow",
    "train": "green",
    "sync": "blue",
    "wait": "red",
}
PHASE_BAR = 30


def board_view(
    *,
    step: int,
    max_steps: int,
    seconds_left: float | None,
    rewards: list[float],
    figures: list[tuple[str, str]],
    evaluations: dict[str, list[tuple[str, str]]],
    phases: dict[str, float],
    overlaps: dict[str, float] | None = None,
) -> RenderableType:
    """Render all parts from top to bottom; a part without values is left out.

    Args:
        step, max_steps: progress.
        seconds_left: estimate, or None.
        rewards: history for the sparkline, oldest first.
        figures: labels and formatted values.
        evaluations: the same by name of the evaluation set ("" for one without).
        phases: seconds by phase.
        overlaps: seconds of a phase's work that was done during another phase.
    """
    left = "estimating" if seconds_left is None else duration(seconds_left)
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text("covey", style="bold"),
        ProgressBar(total=max(max_steps, 1), completed=step, width=40),
        f"{step}/{max_steps or '?'}",
        Text(f"ETA {left}", style="dim"),
    )
    parts: list[RenderableType] = [bar]
    if rewards:
        ends = f"  {min(rewards):.2f} to {max(rewards):.2f}"
        parts.append(Text.assemble(("reward ", "dim"), (sparkline(rewards), "green"), (ends, "dim")))
    if figures:
        parts.append(_figures(figures))
    for name, values in evaluations.items():
        parts.append(Text.assemble((f"eval {name}  ".ljust(7), "dim"), _figures(values)))
    if sum(phases.values()) > 0:
        parts.append(phase_bar(phases, overlaps))
    return Group(*parts)


def _figures(figures: list[tuple[str, str]]) -> Text:
    text = Text(overflow="fold")
    for label, value in figures:
        text.append(f"{label} ", style="dim").append(f"{value}   ", style="bold")
    return text


def sparkline(values: list[float]) -> str:
    """A character per value, its height relative to the smallest and the largest.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARKS) - 1
    return "".join(
        " " if not math.isfinite(value) else SPARKS[round((value - low) / span * top)] if span else SPARKS[top // 2]
        for value in values
    )


def phase_bar(phases: dict[str, float], overlaps: dict[str, float] | None = None) -> Text:
    """A bar divided like the time, with a legend; phases in order of time spent.

    Example:
        >>> phase_bar({"generate": 3.0, "reward": 1.0}, {"reward": 2.0}).plain.split("  ", 1)[1].strip()
        '██████████████████████████████  ■ generate 75%  ■ reward 25% (+50% overlapped)'
    """
    total = sum(phases.values())
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    bar, legend, end = Text.assemble(("time   ", "dim")), Text(), 0.0
    for name, seconds in ordered:
        start, end = end, end + seconds
        cells = round(end / total * PHASE_BAR) - round(start / total * PHASE_BAR)
        colour = PHASE_COLOURS.get(name, "white")
        bar.append("█" * cells, style=colour)
        legend.append("  ■ ", style=colour).append(f"{name} {seconds / total:.0%}")
        if overlapped := (overlaps or {}).get(name):
            legend.append(f" (+{overlapped / total:.0%} overlapped)", style="dim")
    return bar + legend


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(3.2), duration(75), duration(7380)
        ('3s', '1m15s', '2h03m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
