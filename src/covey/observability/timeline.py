"""Picture of a `Timeline`: the latest rollout batch, with a lane for everything that ran concurrently."""

from pathlib import Path
from typing import Any

import numpy as np

from covey.observability.metrics import ROLLOUTS, TRAINER, Span, Timeline
from covey.observability.plots import FAINT, INK, PHASES, add_legend, new_figure, save, strip

TITLES = {ROLLOUTS: "rollouts\nin flight"}  # of lanes that are not shown by their names


def plot_timeline(timeline: Timeline, path: str | Path, title: str = "The latest rollout batch") -> Path | None:
    figure = draw_timeline(timeline, title)
    return save(figure, path) if figure else None


def draw_timeline(timeline: Timeline, title: str = "") -> Any:
    """A figure, or None before anything has run."""
    window = timeline.window()
    rewards = [lane for lane in timeline.lanes() if lane not in (TRAINER, ROLLOUTS) and timeline.spans(lane)]
    if window is None or not timeline.spans(TRAINER):
        return None
    lanes = [TRAINER, *([ROLLOUTS] if timeline.spans(ROLLOUTS) else []), *rewards]
    heights = [2 if lane == ROLLOUTS else 1 for lane in lanes]
    figure = new_figure(9.2, 1.1 + 0.42 * sum(heights), title, fontsize=12)
    axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, lane in zip(axes, lanes, strict=True):
        spans = [(name, (begin - window[0], end - window[0])) for name, (begin, end) in timeline.spans(lane)]
        axis.set_ylabel(TITLES.get(lane, lane), rotation=0, ha="right", va="center", fontsize=8, color=INK)
        strip(axis, grid="x")
        if lane == ROLLOUTS:
            _draw_count(axis, [span for _, span in spans])
        else:
            _draw_spans(axis, spans, by_name=lane == TRAINER)
        axis.set_xlim(0, window[1] - window[0])
    axes[-1].set_xlabel("seconds", fontsize=8, color=FAINT)
    return figure


def _draw_spans(axis: Any, spans: list[tuple[str, Span]], by_name: bool) -> None:
    names = list(dict.fromkeys(name for name, _ in spans))
    for name in names:
        bars = [(begin, end - begin) for one, (begin, end) in spans if one == name]
        colour = PHASES.get(name, FAINT) if by_name else PHASES["reward"]
        axis.broken_barh(bars, (0, 1), facecolors=colour, linewidth=0, label=name)
    if by_name:
        add_legend(axis, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 0.95))
    axis.set_ylim(0, 1)
    axis.set_yticks([])


def _draw_count(axis: Any, spans: list[Span]) -> None:
    times, changes = zip(*sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]), strict=True)
    counts = np.cumsum([0, *changes])
    axis.fill_between([0.0, *times], counts, step="post", color=PHASES["generate"], alpha=0.3, linewidth=0)
    axis.step([0.0, *times], counts, where="post", color=PHASES["generate"], linewidth=1.2)
    axis.set_ylim(0, max(counts) * 1.1)
    axis.set_yticks([0, max(counts)])
