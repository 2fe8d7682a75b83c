"""Progress of training: a live display on a terminal, one line per log elsewhere.

`ProgressDisplay` is a `transformers.TrainerCallback` and replaces the stock progress bar and printer. It reads the
logs; a missing metric is not shown. `Board` holds the values and `covey.observability.dashboard_view` draws them. To
show another metric, add it to `FIGURES`.
"""

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import rich
from rich.console import Console, RenderableType
from rich.live import Live
from transformers import TrainerCallback

from covey.observability.dashboard_view import board_view, duration
from covey.observability.evaluations import evaluation_sets, prefix, with_interval

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

ALWAYS_SHOWN = ("loss", "grad_norm")
"""Metrics that are shown as nan or inf, too."""

HISTORY = 60
"""Points of the reward's sparkline."""


@dataclass
class Board:
    """Latest values of a run.

    Attributes:
        step, max_steps: optimizer steps done and to do (0 while unknown).
        logs: latest value of every metric of training.
        evaluations: by name of the evaluation set ("" for one without), its latest metrics without their prefix.
        rewards: rewards of the latest logs, oldest first.
        seconds_per_step: over the steps of this process; None before the first.
        tokens_per_second: between the last two logs; None before the second.
    """

    step: int = 0
    max_steps: int = 0
    logs: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step."""
        if self.seconds_per_step is None or not self.max_steps:
            return None
        return max(self.max_steps - self.step, 0) * self.seconds_per_step

    def figures(self) -> list[tuple[str, str]]:
        """Labels and formatted values of the latest logs."""
        shown = readable(self.logs)
        if self.tokens_per_second is not None:
            shown.append(("tok/s", f"{self.tokens_per_second:,.0f}"))
        return shown

    def phases(self) -> dict[str, float]:
        """Seconds by phase in the last window."""
        return self._named("phase/")

    def overlaps(self) -> dict[str, float]:
        """Seconds in the last window in which a phase's work was done during another phase."""
        return self._named("overlap/")

    def _named(self, start: str) -> dict[str, float]:
        return {name.removeprefix(start): value for name, value in self.logs.items() if name.startswith(start)}


def readable(logs: dict[str, float]) -> list[tuple[str, str]]:
    """Labels and formatted values of the metrics in `FIGURES` that are there and finite.

    A loss or gradient norm that is not finite is shown, since it is an error rather than a missing value.

    Example:
        >>> readable({"reward": 0.5, "kl": float("nan"), "loss": float("nan"), "epoch": 1.0})
        [('reward', '0.500'), ('loss', '+nan')]
    """
    return [
        (label, _without_minus_zero(form.format(logs[name])))
        for name, (label, form) in FIGURES.items()
        if isinstance(logs.get(name), int | float) and (math.isfinite(logs[name]) or name in ALWAYS_SHOWN)
    ]


def _without_minus_zero(text: str) -> str:
    return text.lstrip("+-") if not text.strip("+-0.") else text


class ProgressDisplay(TrainerCallback):
    """Shows progress on the main process.

    Args:
        console: where to; standard output if None.
        clock: seconds since some fixed moment.
        plain: one line per log on a terminal too.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic, *, plain: bool = False
    ):
        self.plain = plain
        self.console = console or rich.get_console()
        self.board = Board()
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._tokens: tuple[float, float] | None = None
        self._stop: Callable[[], Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the live display."""
        self._began = (state.global_step, self._clock())
        self._tokens = (0.0, self._clock()) if state.global_step == 0 else None
        self.board = Board(step=state.global_step, max_steps=state.max_steps)
        if state.is_world_process_zero and self.console.is_terminal and not self.plain:
            self._start_live()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._move_to(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show new values: of training, of an evaluation, or of the whole run at its end."""
        if not state.is_world_process_zero or not logs:
            return
        self._move_to(state)
        if "train_runtime" in logs:
            steps = f"{state.global_step} step{'' if state.global_step == 1 else 's'}"
            self._say(f"trained {steps} in {duration(logs['train_runtime'])}")
        elif any(name.startswith("eval_") for name in logs):
            for name in evaluation_sets(logs):
                self._take_evaluation(name, logs)
        else:
            self._take(logs)
            if self._stop is None:
                self._say(self._line())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the last state of the display on the screen."""
        self._move_to(state)
        self.close()

    def close(self) -> None:
        """Stop the live display; also happens when this object goes away, as after an exception."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _start_live(self) -> None:
        self.close()
        board = self.board  # the display must not hold this object, or it would never go away
        live = Live(_Drawing(board), console=self.console, refresh_per_second=2)
        live.start()
        self._stop = weakref.finalize(self, live.stop)

    def _move_to(self, state: Any) -> None:
        self.board.step, self.board.max_steps = state.global_step, state.max_steps
        if self._began is not None and state.global_step > self._began[0]:
            self.board.seconds_per_step = (self._clock() - self._began[1]) / (state.global_step - self._began[0])

    def _take(self, logs: dict[str, Any]) -> None:
        self.board.logs = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if math.isfinite(reward := self.board.logs.get("reward", math.nan)):
            self.board.rewards.append(reward)
        if (tokens := self.board.logs.get("num_tokens")) is not None:
            now = self._clock()
            if self._tokens is not None and now > self._tokens[1]:
                self.board.tokens_per_second = (tokens - self._tokens[0]) / (now - self._tokens[1])
            self._tokens = (tokens, now)

    def _take_evaluation(self, name: str, logs: dict[str, Any]) -> None:
        start = prefix(name)
        metrics = {key.removeprefix(start): value for key, value in logs.items() if key.startswith(start)}
        self.board.evaluations[name] = metrics
        label = f"eval {name}" if name else "eval"
        self._say(f"{label}  {self._place()}  {_joined(with_interval(metrics) + readable(metrics))}")

    def _place(self) -> str:
        total = self.board.max_steps
        return f"step {self.board.step:>{len(str(total))}}/{total}" if total else f"step {self.board.step}"

    def _line(self) -> str:
        left = self.board.seconds_left
        ending = f"  ETA {duration(left)}" if left is not None else ""
        return f"{self._place()}  {_joined(self.board.figures())}{ending}"

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Drawing:
    """A renderable that draws the current board."""

    def __init__(self, board: Board):
        self.board = board

    def __rich__(self) -> RenderableType:
        board = self.board
        return board_view(
            step=board.step,
            max_steps=board.max_steps,
            seconds_left=board.seconds_left,
            rewards=list(board.rewards),
            figures=board.figures(),
            evaluations={
                name: with_interval(metrics) + readable(metrics) for name, metrics in board.evaluations.items()
            },
            phases=board.phases(),
            overlaps=board.overlaps(),
        )


def _joined(figures: list[tuple[str, str]]) -> str:
    return "  ".join(f"{label} {value}" for label, value in figures)
