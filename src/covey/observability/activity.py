"""The phase of a run within its step and the part of it that is done, for a display that follows."""

import time
from collections.abc import Callable
from typing import Any

from covey.observability.metrics import EVALUATE

WORDS = {
    "generate": "sampling",
    "reward": "rewards",
    "score": "log-probs",
    "teacher": "teachers",
    "train": "training",
    "sync": "sending weights",
    "wait": "waiting for rollouts",
    EVALUATE: "evaluation",
}
"""Phases as a reader knows them; others have their own names."""


class Activity:
    """The phase that runs, and the part of it that is done; `changed` is called whenever either changes, on any thread.

    Example:
        >>> activity = Activity()
        >>> activity.begin("generate"); activity.count(32); activity.advance(12)
        >>> str(activity)
        'sampling 12 of 32'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.changed: Callable[[], None] = lambda: None
        self._clock = clock
        self._phase, self._detail, self._done, self._total = "", "", 0, 0
        self._whole = ""  # that this is a part of, as an evaluation
        self._since = clock()

    def begin(self, phase: str) -> None:
        """Take note of a phase that begins or continues."""
        if phase != self._phase:
            self._phase, self._detail, self._done, self._total, self._since = phase, "", 0, 0, self._clock()
            self.changed()

    def count(self, total: int, done: int = 0) -> None:
        """Set how many parts the phase has."""
        self._done, self._total = done, total
        self.changed()

    def advance(self, parts: int = 1, detail: str = "") -> None:
        """Count parts that are done; `detail` names the one that runs."""
        self._done, self._detail = self._done + parts, detail
        self.changed()

    def inside(self, whole: str) -> None:
        """Name the whole that phases are parts of from now on; an empty name: they are parts of a step."""
        self._whole = whole
        self.changed()

    @property
    def seconds(self) -> float:
        """Time that the phase has taken so far."""
        return self._clock() - self._since

    def __str__(self) -> str:
        word = WORDS.get(self._phase, self._phase)
        counted = f"{word} {min(self._done, self._total)} of {self._total}" if self._total else word
        own = f"{counted}: {self._detail}" if self._detail else counted
        same = word == WORDS[EVALUATE] and self._whole
        return ", ".join(filter(None, (self._whole, "" if same else own)))


class Counted:
    """Callbacks of rollouts (`RolloutCallbacks`) that count those that have ended."""

    def __init__(self, callbacks: Any, activity: Activity):
        self._callbacks, self._activity = callbacks, activity

    def on_rollouts(self, start: int, rows: list[dict[str, Any]], rollouts: list[Any]) -> None:
        self._callbacks.on_rollouts(start, rows, rollouts)
        self._activity.advance(len(rollouts))

    def on_group(self, start: int, rows: list[dict[str, Any]], rollouts: list[Any]) -> None:
        self._callbacks.on_group(start, rows, rollouts)
