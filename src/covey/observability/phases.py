"""Where the time of a step goes: wall-clock seconds by phase.

Work on a GPU is counted where the host waits for it. Used by one thread; not a profiler.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds spent in named phases. A phase inside another pauses the outer one.

    Args:
        clock: seconds since some fixed moment.
        notice: called with the name of each phase that begins or goes on.
        span: called with name, begin and end of every stretch of time that is charged to a phase.

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
        """Count the time inside the `with` block, less that of phases inside it, towards `name`."""
        self._settle()
        self._open.append(name)
        try:
            self._notice(name)
            yield
        finally:
            self._settle()
            self._open.pop()
        if self.current:  # and no exception: the last notice then tells where it came from
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
