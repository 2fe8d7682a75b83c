"""Display of training progress: live on a terminal, one line per log elsewhere."""

import html
import io
import math
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import rich
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from covey.observability.activity import Activity
from covey.observability.completions import decimal
from covey.observability.metric_docs import evaluation_sets, is_taken, metrics_of, with_interval
from covey.observability.metrics import EVALUATE
from covey.observability.plots import FAINT, PHASES, series
from covey.runtime.interrupts import say

FIGURES: dict[str, tuple[str, str]] = {
    "reward": ("reward", "{:.3f}"),
    "reward_std": ("std", "{:.3f}"),
    "completions/mean_length": ("length", "{:.1f}"),
    "completions/clipped_ratio": ("cut off", "{:.0%}"),
    "rollouts/turns": ("turns", "{:.1f}"),
    "rollouts/failed": ("failed", "{:.0%}"),
    "tools/call_frequency": ("calls", "{:.1f}"),
    "tools/failure_frequency": ("calls failed", "{:.0%}"),
    "entropy": ("entropy", "{:.3f}"),
    "kl": ("kl", "{:.4f}"),
    "loss": ("loss", "{:+.4f}"),
    "grad_norm": ("grad", "{:.3g}"),
    "step_time": ("s/step", "{:.2f}"),
}
"""Metrics shown, in this order: label and format."""

ALWAYS_SHOWN = ("loss", "grad_norm")  # metrics that are shown as nan or inf, too
SPARKS = "▁▂▃▄▅▆▇█"
NOTEBOOK_ROWS = 50  # of the table in a notebook
FIRST_SILENCE, LONGEST_SILENCE = 20.0, 300.0  # seconds without output after which a line says what the run is doing
PHASE_BAR, SHADES = 30, "█▓▒░▞▚▤"  # width in cells, and characters that tell phases apart without colours
Figures = list[tuple[str, str]]  # labels and formatted values


@dataclass
class Board:
    """Latest values of a run, drawn from top to bottom; parts without values are left out."""

    step: int = 0
    max_steps: int = 0  # 0 while unknown
    logs: dict[str, float] = field(default_factory=dict)  # latest value of every metric of training
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # latest metrics by set ("": without a name)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=60))  # of the latest logs, oldest first
    seconds_per_step: float | None = None  # over the steps of this process; None before the first
    tokens_per_second: float | None = None  # between the last two logs; None before the second
    activity: Activity | None = None  # within the step
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    @property
    def seconds_left(self) -> float | None:
        if self.seconds_per_step is None or not self.max_steps:
            return None
        return max(self.max_steps - self.step, 0) * self.seconds_per_step

    def figures(self) -> Figures:
        speed = [] if self.tokens_per_second is None else [("tok/s", f"{self.tokens_per_second:,.0f}")]
        own = [(name[8:-5], decimal(self.logs[name], 3)) for name in self.logs if re.fullmatch("rewards/.*/mean", name)]
        figures = readable(self.logs)
        labelled = [(name, re.fullmatch("(?:roles|sources)/(.*)/reward", name)) for name in self.logs]
        by_label = [(match[1], decimal(self.logs[name], 3)) for name, match in labelled if match]
        figures[1:1] = (own if len(own) > 1 else []) + by_label  # behind the total
        return figures + speed

    def _named(self, start: str) -> dict[str, float]:
        return {name.removeprefix(start): value for name, value in self.logs.items() if name.startswith(start)}

    def __rich__(self) -> RenderableType:
        left = "estimating" if self.seconds_left is None else duration(self.seconds_left)
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text("covey", style="bold"),
            ProgressBar(total=max(self.max_steps, 1), completed=self.step, width=40),
            f"{self.step}/{self.max_steps or '?'}",
            Text(f"ETA {left}", style="dim"),
        )
        parts: list[RenderableType] = [bar] if self.max_steps or self.step else []
        if self.activity is not None and (doing := str(self.activity)):
            line = Table.grid(padding=(0, 1))
            line.add_row(self.spinner, Text(doing), Text(duration(self.activity.seconds), "dim"))
            parts.append(line)
        if self.rewards:
            ends = f"  {min(self.rewards):.2f} to {max(self.rewards):.2f}"
            parts.append(Text.assemble(("reward ", "dim"), (sparkline([*self.rewards]), "green"), (ends, "dim")))
        if figures := self.figures():
            parts.append(_drawn(figures))
        for name, metrics in self.evaluations.items():
            figures = with_interval(metrics) + readable(metrics)
            parts.append(_drawn(figures, f"eval {name}".rstrip()))
        phases = self._named("phase/")
        if sum(phases.values()) > 0:
            parts.append(phase_bar(phases, self._named("overlap/")))
        return Group(*parts)


def readable(logs: dict[str, float]) -> Figures:
    figures = []
    for name, (label, form) in FIGURES.items():
        if isinstance(value := logs.get(name), int | float) and (math.isfinite(value) or name in ALWAYS_SHOWN):
            text = decimal(value, 3) if form == "{:.3f}" else form.format(value)
            figures.append((label, text if text.strip("+-0.na") else text.lstrip("+-")))  # no sign of a zero
    return figures


def _drawn(figures: Figures, title: str = "") -> Columns:
    """Figures in columns; a figure is never separated from its label, however narrow the screen."""
    cells = [Text(title, "dim")] if title else []
    cells += [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in figures]
    return Columns(cells, padding=(0, 2))


def sparkline(values: list[float]) -> str:
    """One character per value, with a height between the smallest and the largest value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARKS) - 1
    return "".join(
        " " if not math.isfinite(value) else SPARKS[round((value - low) / span * top)] if span else SPARKS[top // 2]
        for value in values
    )


def phase_bar(phases: dict[str, float], overlaps: dict[str, float] | None = None) -> Group:
    total, bar, end = sum(phases.values()), Text.assemble(("time   ", "dim")), 0.0
    legend = []
    known = dict(zip(PHASES, cycle(SHADES), strict=False))
    others = dict(zip(sorted(phases.keys() - known.keys()), cycle(SHADES), strict=False))
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        sign = (known | others)[name]
        start, end = end, end + seconds
        cells = round(end / total * PHASE_BAR) - round(start / total * PHASE_BAR)
        colour = PHASES.get(name, FAINT)
        bar.append(sign * cells, style=colour)
        legend.append(Text.assemble((f"{sign} ", colour), f"{name} {seconds / total:.0%}"))
        if overlapped := (overlaps or {}).get(name):
            legend[-1].append(f" (+{overlapped / total:.0%} overlapped)", style="dim")
    return Group(bar, Columns(legend, padding=(0, 2)))


def duration(seconds: float) -> str:
    """A readable duration: 3s, 1m15s, 2h03m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


class Notebook:
    """An output of a notebook that is rewritten during the run: a table of the latest logs, and lines around it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines: list[str] = []  # above the table
        self._ends: list[str] = []  # below it
        self._rows: deque[tuple[str, Figures]] = deque(maxlen=NOTEBOOK_ROWS)
        self._left_out = 0
        self._doing = ""
        self._shown = -math.inf

    def add(self, line: str) -> None:
        (self._ends if self._rows else self._lines).append(line)
        self._write()

    def row(self, place: str, figures: Figures, board: Board) -> None:
        self._left_out += len(self._rows) == NOTEBOOK_ROWS
        self._rows.append((place, figures))
        self.show(board, self._doing, at_once=True)

    def show(self, board: Board, doing: str, at_once: bool = False) -> None:
        left = f", {duration(board.seconds_left)} left" if board.seconds_left else ""
        self._doing = f"step {board.step} of {board.max_steps}{left}: {doing}" if board.max_steps else doing
        if at_once or time.monotonic() - self._shown > 0.5:
            self._write()

    def end(self) -> None:
        if self._doing:
            self._doing = ""
            self._write()

    def _write(self) -> None:
        from IPython.display import HTML, display

        self._shown = time.monotonic()
        page = HTML(self.html())
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def html(self) -> str:
        labels = list(dict.fromkeys(label for _, figures in self._rows for label, _ in figures))
        head = "".join(f"<th>{html.escape(label)}</th>" for label in ("", *labels))
        body = "".join(
            f"<tr><th>{html.escape(place)}</th>"
            + "".join(f"<td>{html.escape(dict(figures).get(label, ''))}</td>" for label in labels)
            + "</tr>"
            for place, figures in self._rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self._rows else ""
        skipped = [f"({self._left_out} earlier logs are not shown)"] if self._left_out else []
        above = [*self._lines, *filter(None, [self._doing]), *skipped]
        return "".join(map(_line, above)) + table + "".join(map(_line, self._ends))


def _line(text: str) -> str:
    return f"<div>{html.escape(text)}</div>"


class ProgressDisplay(TrainerCallback):
    """Shows progress on the main process; `plain`: one line per log on a terminal too."""

    def __init__(self, console: Console | None = None, clock: Any = time.monotonic, *, plain: bool = False):
        self.plain = plain
        self.console = console or rich.get_console()
        self.notebook = Notebook() if self.console.is_jupyter and not plain else None
        file = self.console.file
        if isinstance(file, io.TextIOWrapper) and file.errors in ("strict", "surrogateescape"):
            file.reconfigure(errors="backslashreplace")  # a stream that cannot encode a character must not end the run
        self.board = Board()
        self.until: int | None = None  # the last step, if it is not the schedule's
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None  # (tokens so far, seconds of training)
        self._trained = 0.0  # seconds in phases of training: without evaluations, checkpoints and reports
        self._stop: Callable[[], Any] | None = None
        self._activity: Activity | None = None
        self._beats: threading.Event | None = None  # set it to end the lines of a run that is silent for long
        self._said, self._patience = clock(), FIRST_SILENCE
        self._hidden = False  # another process shows the run
        self._training = False

    def follow(self, activity: Activity) -> None:
        """Also show the activity within a step, and evaluations without training."""
        self._activity = activity
        reference = weakref.WeakMethod(self._on_activity)

        def changed() -> None:
            if (method := reference()) is not None:
                method()

        activity.changed = changed

    def _on_activity(self) -> None:
        if self.notebook is not None:
            if self._training or str(self._activity):
                self.notebook.show(self.board, str(self._activity))
            return
        if self._stop is None and self._beats is None and self._activity is not None and str(self._activity):
            self._show()

    def _show(self) -> None:
        """Begin the live display or, without a terminal, the lines of a run that is silent for long."""
        if self.plain or self._hidden:
            return
        self.board.activity = self._activity
        if self.notebook is not None:
            return
        if self.console.is_terminal:
            # Live holds the board alone: held itself, this object would never go away
            live = Live(self.board, console=self.console, refresh_per_second=4, transient=not self.board.max_steps)
            live.start()
            self._stop = weakref.finalize(self, live.stop)
            return
        self._beats, reference = threading.Event(), weakref.WeakMethod(self._beat)
        beats = self._beats
        weakref.finalize(self, beats.set)

        def beat() -> None:
            while not beats.wait(1.0) and (method := reference()) is not None:
                method()

        threading.Thread(target=beat, name="covey-progress", daemon=True).start()

    def _beat(self) -> None:
        """Print a line with the current activity after a long silence, each time after twice as long."""
        activity, now = self._activity, self._clock()
        if activity is not None and (doing := str(activity)) and now - self._said >= self._patience:
            self._patience = min(2 * self._patience, LONGEST_SILENCE)
            self._say("  ".join(filter(None, (self._place(), f"{doing} ({duration(activity.seconds)})"))))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.notebook is not None:
            self.notebook = Notebook()  # a further training has an output of its own
        self._began, self._training = (state.global_step, self._clock()), True
        self._tokens = (0.0, self._trained) if state.global_step == 0 else None
        self.board = Board(step=state.global_step, max_steps=state.max_steps)
        self.board.rewards.extend(series(state.log_history, "reward")[1])  # of a resumed run, from before
        if state.is_world_process_zero:
            name = getattr(getattr(kwargs.get("model"), "config", None), "_name_or_path", "") or "the model"
            resumed = f" from step {state.global_step}" if state.global_step else ""
            self._say(f"training {name}{resumed} to step {self.until or state.max_steps}, output: {args.output_dir}")
        self._hidden = not state.is_world_process_zero
        self.close()
        self._show()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.board.step, self.board.max_steps = state.global_step, state.max_steps
        if self._began is not None and state.global_step > self._began[0]:
            self.board.seconds_per_step = (self._clock() - self._began[1]) / (state.global_step - self._began[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.on_step_end(args, state, control)
        if "train_runtime" in logs:
            first = self._began[0] if self._began else 0  # of a resumed run, the checkpoint's
            own = state.global_step - first
            resumed = f", from {first} to {state.global_step}," if first else ""
            self._say(f"trained {own} step{'' if own == 1 else 's'}{resumed} in {duration(logs['train_runtime'])}")
        elif any(name.startswith("eval_") for name in logs):
            for name in evaluation_sets(logs):
                metrics = self.board.evaluations[name] = metrics_of(name, logs)
                figures = _joined(with_interval(metrics) + readable(metrics))
                place = " ".join(filter(None, ("eval", name, self._place())))
                self._say(f"{place}  {figures}" if figures else place)
        else:
            # A further update of the same rollouts has no reward of its own.
            shown = self.board.figures() if self._take(logs) else readable(logs)
            if self.notebook is not None and any(map(is_taken, {*logs} - {"epoch"})):
                self.notebook.row(self._place(), shown, self.board)
            elif self._stop is None and any(map(is_taken, {*logs} - {"epoch"})):  # not those of a script alone
                left = self.board.seconds_left
                ending = f"  ETA {duration(left)}" if left is not None else ""
                self._say(f"{self._place()}  {_joined(shown)}{ending}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)
        self._training = False
        self.close()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._training:
            self.close()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def close(self) -> None:
        """Stop the live display; also called when this object is collected, as after an exception."""
        if self.notebook is not None:
            self.notebook.end()
        if self._stop is not None:
            self.board.activity = None
            self._stop()
            self._stop = None
        if self._beats is not None:
            self._beats.set()
            self._beats = None

    def tell(self, line: str) -> None:
        """Print a line in the output of the run."""
        self._say(line)

    def announce(self, line: str) -> None:
        """Print a line immediately, above the live display if there is one; called from any thread."""
        if self._stop is None:
            say(line)
        else:
            self._say(line.lstrip())

    def _take(self, logs: dict[str, Any]) -> bool:
        """Replace all figures with a rollout batch's first log; figures of its further updates (False) are added."""
        board, taken = self.board, {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if begins := "reward" in logs or "completions/mean_length" in logs:
            board.logs = {}
        phases = {name: board.logs.get(name, 0) + taken[name] for name in taken if name.startswith("phase/")}
        board.logs = {**board.logs, **taken, **phases}
        idle = f"phase/{EVALUATE}"
        self._trained += sum(taken[name] for name in taken if name.startswith("phase/") and name != idle)
        if begins and math.isfinite(reward := board.logs.get("reward", math.nan)):
            board.rewards.append(reward)
        tokens = taken.get("num_tokens", 0)
        new = begins or "num_tokens" not in taken or self._tokens is None or tokens != self._tokens[0]
        if tokens and (self._tokens is None or tokens != self._tokens[0]):
            if self._tokens is not None and self._trained > self._tokens[1]:
                board.tokens_per_second = (tokens - self._tokens[0]) / (self._trained - self._tokens[1])
            self._tokens = (tokens, self._trained)
        return new

    def _place(self) -> str:
        step, total = self.board.step, self.board.max_steps
        if not (step or total):  # an evaluation without training
            return ""
        return f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"

    def _say(self, line: str) -> None:
        self._said = self._clock()
        if self.notebook is not None:
            self.notebook.add(line)
            return
        if self.console.is_terminal:
            line = folded(line, self.console.width)
        with suppress(SystemExit, OSError, ValueError):  # a closed pipe, a full disk, or a closed stream
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def folded(line: str, width: int) -> str:
    """A line wrapped between its figures; a terminal would break it anywhere."""
    lines: list[str] = []
    for figure in line.split("  "):
        if lines and len(lines[-1]) + 2 + len(figure) <= width:
            lines[-1] += f"  {figure}"
        else:
            lines.append(f"  {figure}" if lines else figure)
    return "\n".join(lines)


def _joined(figures: Figures) -> str:
    return "  ".join(f"{label} {value}" for label, value in figures)
