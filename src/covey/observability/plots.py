"""Curves of a run as one picture with several small plots over optimizer steps; needs no screen."""

import math
import re
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from covey.observability.metric_docs import all_sets, prefix
from covey.observability.metrics import ZERO_WHEN_EMPTY
from covey.runtime.files import written_whole

INK, FAINT, GRID = "#1f2933", "#6b7785", "#e4e7eb"
COLOURS = ["#2563eb", "#e07a1f", "#15936b", "#9b4dca", "#c2344b", "#5b6b7d", "#8a6d1f"]

PHASES = {
    "generate": "#2563eb",
    "train": "#15936b",
    "reward": "#9b4dca",
    "score": "#e07a1f",
    "teacher": "#d4a017",
    "sync": "#5b6b7d",
    "wait": "#c2344b",
    "evaluate": "#8a6d1f",
}
"""Colours of phases, on the terminal and in pictures."""


@dataclass(frozen=True)
class Panel:
    """One small plot."""

    title: str
    curves: dict[str, str]  # metric names and their labels
    band: tuple[str, ...] = ()  # metrics of a shaded band: ("low", "high"), or ("deviation",) around the first curve
    percent: bool = False  # the axis shows shares


PANELS = (
    Panel("Reward (shaded: ± one standard deviation)", {"reward": "training"}, ("reward_std",)),
    Panel(
        "Completion length (tokens)",
        {"completions/mean_length": "mean", "completions/mean_terminated_length": "mean of those that ended"},
        ("completions/min_length", "completions/max_length"),
    ),
    Panel(
        "Groups and completions",
        {"frac_advantage_zero": "groups without signal", "completions/clipped_ratio": "completions cut off"},
        percent=True,
    ),
    Panel("Turns and calls per rollout", {"rollouts/turns": "turns", "tools/call_frequency": "calls"}),
    Panel(
        "What went wrong",
        {
            "tools/failures/malformed": "calls that cannot be read",
            "tools/failures/unknown_tool": "calls of unknown tools",
            "tools/failures/wrong_argument": "wrong arguments",
            "tools/failures/exception": "tool raised",
            "tools/failures/timeout": "tool too slow",
            "rollouts/tool_budget": "rollouts with no calls left",
            "rollouts/failed": "rollouts failed",
        },
        percent=True,
    ),
    Panel("Entropy (nats per token)", {"entropy": "entropy"}),
    Panel("KL to the reference", {"kl": "kl"}),
    Panel(
        "Clipped ratios",
        {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "cispo_clip_ratio": "capped"},
        percent=True,
    ),
    Panel("Loss", {"loss": "loss"}),
    Panel("Gradient norm", {"grad_norm": "norm"}),
)
PHASES_PANEL = Panel("Seconds per step by phase", {})
MOST_BARS = 200  # most bars per phase; a bar may stand for several logs, as drawing time grows with the number
ROUNDING = 1e-6  # a panel whose values are all smaller is left out


def plot_curves(log_history: list[dict[str, Any]], path: str | Path, title: str = "Training") -> Path | None:
    """Write a PNG of every curve in `Trainer.state.log_history`, if there is one."""
    panels = drawn_panels(log_history)
    if not panels:
        return None
    columns = min(len(panels), 2)  # readable where the picture is as wide as a page
    rows = math.ceil(len(panels) / columns)
    figure = _new_figure(4.6 * columns, 3.0 * rows + 0.5, title)
    for place, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(rows, columns, place), log_history, panel)
    with written_whole(path := Path(path)) as new:
        figure.savefig(new)
    return path


def drawn_panels(log_history: list[dict[str, Any]]) -> list[Panel]:
    """The reward panel, and other panels for which the logs have values other than 0."""
    reward, *others = _panels(log_history)
    panels = [reward] * any(series(log_history, name)[1] for name in reward.curves)
    for panel in others:
        largest = max((abs(one) for name in panel.curves for one in series(log_history, name)[1]), default=0.0)
        panels += [panel] * (largest > ROUNDING)
    timed = any(key.startswith("phase/") for entry in log_history for key in entry)
    return panels + [PHASES_PANEL] * timed


def _new_figure(width: float, height: float, title: str) -> Any:
    from matplotlib.figure import Figure  # unlike pyplot it needs no screen

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    style = {"fontsize": 14, "fontweight": "bold", "color": INK, "x": 0.01, "ha": "left"}
    figure.suptitle(title, parse_math=False, **style)  # names may hold `$`
    return figure


def _strip(axis: Any, grid: str) -> None:
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=FAINT, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def _add_legend(axis: Any, **place: Any) -> None:
    axis.legend(fontsize=7.5, frameon=False, labelcolor=INK, **place)


def series(log_history: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric. Lengths of ended completions are 0 in logs where none ended; these are left out."""
    points = [
        (float(entry.get("step", index)), float(entry[name]))
        for index, entry in enumerate(log_history)
        if _finite(entry.get(name)) and not (name in ZERO_WHEN_EMPTY and entry.get("completions/clipped_ratio") == 1)
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean over `window` values (an odd number) around each; the window is narrower, but centred, near the ends."""
    smoothed = []
    for index in range(len(values)):
        reach = min(window // 2, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        smoothed.append(sum(near) / len(near))
    return smoothed


def _panels(log_history: list[dict[str, Any]]) -> list[Panel]:
    """`PANELS` with a curve for each evaluation set, and with a panel of rewards if there are several functions."""
    reward, *others = PANELS
    sets = {f"{prefix(name)}reward": f"evaluation {name}".rstrip() for name in all_sets(log_history)}
    names = dict.fromkeys(key for entry in log_history for key in entry)
    own = {name: name.split("/")[1] for name in names if name.startswith("rewards/") and name.endswith("/mean")}
    several = [Panel("Rewards by function", own)] if len(own) > 1 else []
    for kind in ("role", "source"):
        labelled = {name: match[1] for name in names if (match := re.fullmatch(f"{kind}s/(.*)/reward", name))}
        several += [Panel(f"Reward by {kind}", labelled)] if labelled else []
    return [replace(reward, curves={**reward.curves, **sets}), *others, *several]


def _draw_panel(axis: Any, log_history: list[dict[str, Any]], panel: Panel) -> None:
    _style(axis, panel.title)
    if panel is PHASES_PANEL:
        _draw_phases(axis, [entry for entry in log_history if any(key.startswith("phase/") for key in entry)])
        return
    _draw_band(axis, log_history, panel)
    styles = [(colour, line) for line in ("-", "--", ":") for colour in COLOURS]
    for (colour, line), (name, label) in zip(cycle(styles), panel.curves.items(), strict=False):
        steps, values = series(log_history, name)
        if not values:
            continue
        window = len(values) // 12 // 2 * 2 + 1
        noisy = window > 1 and not name.startswith("eval_")
        few = {"marker": "o", "markersize": 3} if len(values) < 30 or name.startswith("eval_") else {}
        if noisy:
            axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values = smooth(values, window)
        axis.plot(steps, values, line, color=colour, linewidth=1.8, label=label, **({} if noisy else few))
    axis.set_xlim(0, max(axis.dataLim.x1, 1.0) * 1.02)
    if panel.percent:
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%" if value <= 1 else "")
        axis.set_ylim(bottom=0)
    drawn = len(axis.get_legend_handles_labels()[1])
    if drawn > 1:
        low, high = axis.get_ylim()
        columns = 1 if drawn < 4 else 2
        axis.set_ylim(low, high + (high - low) * 0.11 * math.ceil(drawn / columns))  # room above the curves
        _add_legend(axis, loc="upper left", ncols=columns)


def _draw_band(axis: Any, log_history: list[dict[str, Any]], panel: Panel) -> None:
    centre = next(iter(panel.curves))
    entries = [entry for entry in log_history if all(_finite(entry.get(name)) for name in (centre, *panel.band))]
    if not panel.band or not entries:
        return
    steps = [float(entry.get("step", index)) for index, entry in enumerate(entries)]
    if len(panel.band) == 2:
        low, high = ([entry[name] for entry in entries] for name in panel.band)
    else:
        low = [entry[centre] - entry[panel.band[0]] for entry in entries]
        high = [entry[centre] + entry[panel.band[0]] for entry in entries]
    axis.fill_between(steps, low, high, color=COLOURS[0], alpha=0.12, linewidth=0)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw_phases(axis: Any, entries: list[dict[str, Any]]) -> None:
    """Plot seconds per optimizer step with stacked phases; overlapped work is drawn as lines, as it adds no time."""
    steps = np.array([float(entry.get("step", index)) for index, entry in enumerate(entries)])
    widths = np.diff(steps, prepend=0.0)  # optimizer steps that each log is about
    widths[widths <= 0] = 1.0
    firsts = np.arange(0, len(steps), math.ceil(len(steps) / MOST_BARS))  # logs that a bar begins with
    steps, widths = steps[[*(firsts[1:] - 1), -1]], np.add.reduceat(widths, firsts)
    names = dict.fromkeys(key for entry in entries for key in entry if key.startswith(("phase/", "overlap/")))
    seconds = {name: np.array([entry.get(name, 0.0) for entry in entries]) for name in names}
    per_step = {name: np.add.reduceat(seconds[name], firsts) / widths for name in names}
    phases = sorted((one for one in names if one.startswith("phase/")), key=lambda name: -sum(per_step[name] * widths))
    base = np.zeros(len(steps))
    for name in phases:
        label = name.removeprefix("phase/")
        colour = PHASES.get(label, FAINT)
        axis.bar(steps - widths / 2, per_step[name], widths, base, color=colour, label=label, linewidth=0)
        base += per_step[name]
    axis.set_ylim(0, base.max() * 1.5 or 1.0)
    for name in (name for name in names if name not in phases):
        if per_step[name].any():
            label = f"{name.removeprefix('overlap/')} overlapped"
            axis.hlines(per_step[name], steps - widths, steps, color=INK, linewidth=1.2, linestyle=":", label=label)
    _add_legend(axis, loc="upper left", ncols=3, columnspacing=1)


def _style(axis: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=10, loc="left", color=INK)
    axis.set_xlabel("step", fontsize=8, color=FAINT)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.margins(x=0.02)
    _strip(axis, grid="y")
