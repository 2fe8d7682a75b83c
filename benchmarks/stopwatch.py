"""Wall-clock time by phase, taken by wrapping methods from outside: the same for every library.

A phase inside another pauses the outer one. Nothing of the wrapped objects is changed but the attribute that is called.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from covey.observability.metrics import PhaseTimer

COMPUTED = ("score", "train")
"""Phases that compute given tokens."""


class Stopwatch:
    """Adds up seconds and token positions by phase.

    Args:
        clock: seconds since some fixed moment.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.phase = PhaseTimer(clock)
        self.positions: dict[str, int] = {}
        self._layer: Any = None
        self._hook: Any = None  # on it, in the phases of `COMPUTED`

    @property
    def current(self) -> str:
        """The innermost open phase; `other` when none is."""
        return self.phase.open[-1] if self.phase.open else "other"

    def wrap(self, owner: Any, method: str, name: str, inside: dict[str, str] | None = None) -> None:
        """Let every call of `owner.method` count towards `name`.

        Args:
            owner: the object whose attribute is replaced.
            method: the attribute.
            name: of the phase.
            inside: another phase instead, where the call happens within the phase that is the key.
        """
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            phase = (inside or {}).get(self.current, name)
            with self.phase(phase), self._counting(phase in COMPUTED):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def count_positions(self, embedding: Any, layer: Any) -> None:
        """Count token positions by phase: embedded ones where tokens are sampled, else those that `layer` is run on.

        A recomputed layer counts again. No layer has a hook while tokens are sampled: Covey's engine would not bypass
        its modules then.
        """

        def sampled(_: Any, args: tuple[Any, ...]) -> None:
            if self.current not in COMPUTED:
                self._add(args[0].numel())

        embedding.register_forward_pre_hook(sampled)
        self._layer = layer

    @contextmanager
    def _counting(self, wanted: bool) -> Iterator[None]:
        before = self._hook is not None
        self._count_layer(wanted)
        try:
            yield
        finally:
            self._count_layer(before)

    def _count_layer(self, wanted: bool) -> None:
        def computed(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._add((args[0] if args else kwargs["hidden_states"]).shape[:-1].numel())

        if wanted and self._hook is None and self._layer is not None:
            self._hook = self._layer.register_forward_pre_hook(computed, with_kwargs=True)
        elif not wanted and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _add(self, positions: int) -> None:
        self.positions[self.current] = self.positions.get(self.current, 0) + positions

    def drain(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and positions by phase since the last call."""
        positions, self.positions = self.positions, {}
        return self.phase.drain(), positions
