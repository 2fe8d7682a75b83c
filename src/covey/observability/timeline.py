"""Time of a run: seconds by phase of a step, and a timeline of phases, rollouts and reward functions.

`PhaseTimer` adds up seconds; `Timeline` keeps the latest spans; `plot_timeline` draws the latest rollout batch, with a
lane for everything that ran concurrently.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.observability.plots import COLOURS, FAINT, GRID, INK

Span = tuple[float, float]
"""Begin and end, seconds on one clock."""

MAX_SPANS = 20_000
"""Most recent spans kept of each lane."""

TRAINER, ROLLOUTS = "trainer", "rollouts"
"""Lanes of the main thread's phases and of rollouts in flight. Every other lane is that of a reward function."""


class PhaseTimer:
    """Sums of the wall-clock seconds spent in named phases. A phase inside another pauses the outer one.

    Work on a GPU is counted where the host waits for it. For use by one thread.

    Args:
        clock: seconds since some fixed moment.
        notice: called with the name of each phase that begins or continues.
        span: called with name, begin and end of every interval that is charged to a phase.

    Example:
        >>> phases = PhaseTimer()
        >>> with phases("train"):
        ...     with phases("generate"):
        ...         pass
        >>> sorted(phases.drain())
        ['generate', 'train']
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        notice: Callable[[str], None] = lambda name: None,
        span: Callable[[str, float, float], None] = lambda name, begin, end: None,
    ):
        self._clock = clock
        self._notice = notice
        self._span = span
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @property
    def current(self) -> str | None:
        """The innermost open phase."""
        return self._open[-1] if self._open else None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` block, without that of inner phases, to `name`."""
        self._settle()
        self._open.append(name)
        try:
            self._notice(name)
            yield
        finally:
            self._settle()
            self._open.pop()
        if self.current:  # not after an exception: the last notice then names the phase that failed
            self._notice(self.current)

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call; an open phase is counted up to now."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _settle(self) -> None:
        """Charge the time since the last change to the innermost open phase."""
        now = self._clock()
        if name := self.current:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
            self._span(name, self._since, now)
        self._since = now


class Timeline:
    """Spans by lane and name, and the times at which rollout batches began.

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
        """Record that a rollout batch begins."""
        self._began.append(now)

    def add(self, lane: str, name: str, spans: Iterable[Span]) -> None:
        """Add spans; one that begins where the last of its name ended extends it."""
        lane_spans = self._lanes.setdefault(lane, deque(maxlen=MAX_SPANS))
        for begin, end in spans:
            if lane_spans and lane_spans[-1][0] == name and lane_spans[-1][1][1] == begin:
                begin = lane_spans.pop()[1][0]
            if end > begin:
                lane_spans.append((name, (begin, end)))

    def phase(self, name: str, begin: float, end: float) -> None:
        """Add a span of a phase of the trainer."""
        self.add(TRAINER, name, [(begin, end)])

    def overlap(self, name: str, seconds: float) -> None:
        """Count seconds in which work of a phase was done while another phase ran."""
        self._overlaps[name] = self._overlaps.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Overlapping seconds by phase since the last call."""
        overlaps, self._overlaps = self._overlaps, {}
        return overlaps

    def lanes(self) -> list[str]:
        """Names of the lanes, in the order of their first spans."""
        return list(self._lanes)

    def window(self) -> Span | None:
        """Begin and end of the latest complete rollout batch, or of everything if none is complete."""
        if len(self._began) > 1:
            return self._began[-2], self._began[-1]
        ends = [end for lane in self._lanes.values() for _, (_, end) in lane]
        return (self._began[0], max(ends)) if self._began and ends else None

    def spans(self, lane: str) -> list[tuple[str, Span]]:
        """Names and spans of a lane, clipped to the window."""
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


def plot_timeline(timeline: Timeline, path: str | Path, title: str = "The latest rollout batch") -> Path | None:
    """Write a PNG of the latest rollout batch: lanes from top to bottom, seconds from left to right.

    Args:
        timeline: spans to draw.
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
    """Number of rollouts in flight over time."""
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
    label = {TRAINER: TRAINER, ROLLOUTS: "rollouts\nin flight"}.get(lane, lane)
    axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8, color=INK)
    axis.tick_params(labelsize=8, colors=FAINT, length=0)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
