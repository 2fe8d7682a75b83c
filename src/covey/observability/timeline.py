"""What happened when: phases of the trainer, rollouts under way and calls of reward functions, on one axis.

`Timeline` keeps the latest spans; whoever times something adds to it. `plot_timeline` draws the latest generation, with
a lane for everything that ran beside something else. Not here: sums of seconds (`covey.observability.phases`).
"""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from covey.observability.plots import COLOURS, FAINT, GRID, INK

Span = tuple[float, float]
"""Begin and end, seconds on one clock."""

KEPT = 20_000
"""Spans of a lane that are kept, the latest."""

TRAINER, ROLLOUTS = "trainer", "rollouts"
"""Lanes: what the main thread is at, and rollouts under way. Every other lane is that of a reward function."""


class Timeline:
    """Spans by lane and name, and the moments at which generations began.

    Example:
        >>> timeline = Timeline()
        >>> timeline.begin(0.0)
        >>> timeline.add("trainer", "generate", [(0.0, 2.0)])
        >>> timeline.add("trainer", "train", [(2.0, 3.0)])
        >>> timeline.begin(3.0)
        >>> timeline.window(), timeline.spans("trainer")
        ((0.0, 3.0), [('generate', (0.0, 2.0)), ('train', (2.0, 3.0))])
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[str, Span]]] = {}
        self._began: deque[float] = deque(maxlen=3)
        self._overlaps: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """A generation begins."""
        self._began.append(now)

    def add(self, lane: str, name: str, spans: Iterable[Span]) -> None:
        """Take spans; one that goes on where the last of its name ended makes that one longer."""
        kept = self._lanes.setdefault(lane, deque(maxlen=KEPT))
        for begin, end in spans:
            if kept and kept[-1][0] == name and kept[-1][1][1] == begin:
                begin = kept.pop()[1][0]
            if end > begin:
                kept.append((name, (begin, end)))

    def phase(self, name: str, begin: float, end: float) -> None:
        """The trainer was at a phase."""
        self.add(TRAINER, name, [(begin, end)])

    def overlap(self, name: str, seconds: float) -> None:
        """Count time in which work that a phase would wait for was done beside another."""
        self._overlaps[name] = self._overlaps.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Such seconds by phase since the last call."""
        overlaps, self._overlaps = self._overlaps, {}
        return overlaps

    def lanes(self) -> list[str]:
        """Names of the lanes, in the order of their first spans."""
        return list(self._lanes)

    def window(self) -> Span | None:
        """From the beginning of the latest generation that is complete to its end; else what there is."""
        if len(self._began) > 1:
            return self._began[-2], self._began[-1]
        ends = [end for lane in self._lanes.values() for _, (_, end) in lane]
        return (self._began[0], max(ends)) if self._began and ends else None

    def spans(self, lane: str) -> list[tuple[str, Span]]:
        """Names and spans of a lane within the window, cut at its ends."""
        window = self.window()
        if window is None:
            return []
        cut = [(name, (max(begin, window[0]), min(end, window[1]))) for name, (begin, end) in self._lanes.get(lane, ())]
        return [(name, (begin, end)) for name, (begin, end) in cut if begin < end]


def covered(spans: Iterable[Span], until: float = float("inf")) -> float:
    """Seconds before `until` that lie in at least one span.

    Example:
        >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], until=6.0)
        4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            total, reached = total + end - begin, end
    return total


def plot_timeline(timeline: Timeline, path: str | Path, title: str = "The latest generation") -> Path | None:
    """Write a PNG of the latest generation: one lane below the other, seconds from left to right.

    Args:
        timeline: what happened.
        path: of the PNG; its folder is created.
        title: above the lanes.

    Returns:
        The path, or None if nothing has been timed yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    window = timeline.window()
    rewards = [lane for lane in timeline.lanes() if lane not in (TRAINER, ROLLOUTS) and timeline.spans(lane)]
    if window is None or not timeline.spans(TRAINER):
        return None
    lanes = [TRAINER, *([ROLLOUTS] if timeline.spans(ROLLOUTS) else []), *rewards]
    heights = [2 if lane == ROLLOUTS else 1 for lane in lanes]
    size = (9.2, 1.1 + 0.42 * sum(heights))
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, lane in zip(axes, lanes, strict=True):
        spans = [(name, (begin - window[0], end - window[0])) for name, (begin, end) in timeline.spans(lane)]
        _style(axis, lane)
        if lane == ROLLOUTS:
            _draw_count(axis, [span for _, span in spans])
        else:
            _draw_spans(axis, spans, by_name=lane == TRAINER)
        axis.set_xlim(0, window[1] - window[0])
    axes[-1].set_xlabel("seconds", fontsize=8, color=FAINT)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_spans(axis: Any, spans: list[tuple[str, Span]], by_name: bool) -> None:
    names = list(dict.fromkeys(name for name, _ in spans))
    for number, name in enumerate(names):
        bars = [(begin, end - begin) for one, (begin, end) in spans if one == name]
        colour = COLOURS[number % len(COLOURS)] if by_name else COLOURS[3]
        axis.broken_barh(bars, (0, 1), facecolors=colour, linewidth=0, label=name)
    if by_name:
        axis.legend(
            fontsize=7.5, frameon=False, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 0.95), labelcolor=INK
        )
    axis.set_ylim(0, 1)
    axis.set_yticks([])


def _draw_count(axis: Any, spans: list[Span]) -> None:
    """How many are under way, over time."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, now = [0.0], [0], 0
    for moment, change in changes:
        now += change
        times.append(moment)
        counts.append(now)
    axis.fill_between(times, counts, step="post", color=COLOURS[0], alpha=0.3, linewidth=0)
    axis.step(times, counts, where="post", color=COLOURS[0], linewidth=1.2)
    axis.set_ylim(0, max(counts) * 1.1)
    axis.set_yticks([0, max(counts)])


def _style(axis: Any, lane: str) -> None:
    label = {TRAINER: TRAINER, ROLLOUTS: "rollouts\nunder way"}.get(lane, lane)
    axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8, color=INK)
    axis.tick_params(labelsize=8, colors=FAINT, length=0)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
