"""Progress of a study: a live table of its variants on a terminal, and a line now and then elsewhere."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import rich
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from covey.observability.dashboard import duration

if TYPE_CHECKING:
    from covey_tools.study.variants import Variant

LINE_SECONDS = 10.0  # between two lines where there is no terminal, at least


class StudyDisplay:
    """Shows a study's progress in the terminal while its context is entered; `hidden` shows interruptions only."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic, hidden: bool = False
    ):
        self.console, self._clock, self._hidden = console or rich.get_console(), clock, hidden
        self.variants: Mapping[str, Variant] = {}
        self.round, self._doing = 0, ""
        self._since = self._began = clock()
        self._said = -LINE_SECONDS
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> "StudyDisplay":
        self._began = self._clock()
        if self.console.is_terminal and not self._hidden:
            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._live is not None:
            self._doing = ""
            self._live.stop()
            self._live = None

    def doing(self, what: str) -> None:
        """Take note of what the round does from now on."""
        self._doing, self._since = what, self._clock()

    def show_round(self, number: int, variants: Mapping[str, "Variant"]) -> None:
        """Take note of a round that has ended."""
        self.round, self.variants = number, variants
        if self._live is None and not self._hidden and self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            parts = [f"{name} {' '.join(_figures(variant))}" for name, variant in variants.items()]
            self.say(f"round {number} ({duration(self._clock() - self._began)})  {'  '.join(parts)}")

    def say(self, line: str) -> None:
        """Show a line at once, above the live table where there is one."""
        self.console.print(line.strip(), markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        table = Table("variant", "status", "step", "reward", "evaluation", box=None, padding=(0, 2), header_style="dim")
        for name, variant in self.variants.items():
            step, *rewards = _figures(variant)
            table.add_row(Text(name), variant.status, step, *(rewards[:1] or [""]), _evaluated(variant))
        line = Table.grid(padding=(0, 1))
        elapsed = duration(self._clock() - self._began)
        head = Text.assemble(("covey study", "bold"), f"  round {self.round}  ", (elapsed, "dim"))
        if self._doing:
            line.add_row(self._spinner, Text(self._doing), Text(duration(self._clock() - self._since), "dim"))
        return Group(head, *([table] if self.variants else []), *([line] if self._doing else []))


def _figures(variant: "Variant") -> list[str]:
    """Step, and the latest reward."""
    ends = variant.trainer.state.max_steps if variant.trainer is not None else 0
    rewards = [point["reward"] for point in variant.curve if "reward" in point]
    return [f"{variant.step}/{ends}" if ends else str(variant.step), *(f"{reward:.3f}" for reward in rewards[-1:])]


def _evaluated(variant: "Variant") -> str:
    last = [one for one in variant.evaluations.get(max(variant.evaluations, default=-1), []) if one == one]
    return f"{sum(last) / len(last):.3f}" if last else ""
