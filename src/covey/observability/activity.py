"""The current phase of a step and how much of it is done, for displays."""

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
"""Names of phases for display; other phases are shown under their own names."""


class Activity:
    """The current phase and how much of it is done; `changed` is called on every change, on any thread.

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
        self._whole = ""  # name of a larger whole, such as an evaluation
        self._since = clock()

    def begin(self, phase: str) -> None:
        """Record that a phase begins or continues."""
        if phase != self._phase:
            self._phase, self._detail, self._done, self._total, self._since = phase, "", 0, 0, self._clock()
            self.changed()

    def count(self, total: int, done: int = 0) -> None:
        """Set how many parts the phase has."""
        self._done, self._total = done, total
        self.changed()

    def advance(self, parts: int = 1, detail: str = "") -> None:
        """Count parts as done; `detail` names the current one."""
        self._done, self._detail = self._done + parts, detail
        self.changed()

    def inside(self, whole: str) -> None:
        """Set the name of the whole that phases are parts of; an empty name: the step."""
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
    """Rollout callbacks (`RolloutCallbacks`) that count the rollouts that have ended."""

    def __init__(self, callbacks: Any, activity: Activity):
        self._callbacks, self._activity = callbacks, activity

    def on_rollouts(self, start: int, rows: list[dict[str, Any]], rollouts: list[Any]) -> None:
        self._callbacks.on_rollouts(start, rows, rollouts)
        self._activity.advance(len(rollouts))

    def on_group(self, start: int, rows: list[dict[str, Any]], rollouts: list[Any]) -> None:
        self._callbacks.on_group(start, rows, rollouts)
