"""Wall-clock time by phase, taken by wrapping methods from outside: the same for every library.

A phase inside another pauses the outer one. Nothing of the wrapped objects is changed but the attribute that is called.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from covey.observability.metrics import PhaseTimer


class Stopwatch:
    """Adds up seconds and token positions by phase.

    Args:
        clock: seconds since some fixed moment.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.phase = PhaseTimer(clock)
        self.positions: dict[str, int] = {}

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
            with self.phase((inside or {}).get(self.current, name)):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def count_positions(self, module: Any) -> None:
        """Count the token positions that a module is run on, by phase; a recomputation counts again."""

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.positions[self.current] = self.positions.get(self.current, 0) + hidden.shape[:-1].numel()

        module.register_forward_pre_hook(note, with_kwargs=True)

    def drain(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and positions by phase since the last call."""
        positions, self.positions = self.positions, {}
        return self.phase.drain(), positions
