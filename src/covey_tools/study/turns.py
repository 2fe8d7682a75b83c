"""Turns of trainers in one process: each has a thread and random numbers of its own, and one of them runs at a time."""

import copy
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


class Cancelled(BaseException):
    """Ends a paused trainer from where it samples."""


class Turn:
    """Work on a thread that pauses wherever it samples; the study samples for all that are paused at once.

    `pending` is the coroutine that the work waits for; None once the work has ended, with `error` if it failed.
    """

    def __init__(self, work: Callable[[], None], name: str):
        self.pending: Coroutine[Any, Any, Any] | None = None
        self.error: BaseException | None = None
        self._work = work
        self._shared = shared_state()
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, name=f"covey-{name}", daemon=True)

    @property
    def ended(self) -> bool:
        return self._thread.ident is not None and self.pending is None

    def proceed(self, outcome: Any = None) -> None:
        """Run the work, with what it waited for (a value, or an error to raise), until it pauses again or ends."""
        outside = shared_state()
        set_shared_state(self._shared)
        self._outcome, self.pending = outcome, None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._resumed.release()
        self._paused.acquire()
        self._shared = shared_state()
        set_shared_state(outside)

    def cancel(self) -> None:
        """Unwind paused work."""
        if self.pending is not None:
            self.pending.close()
            self.proceed(Cancelled())

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Block the trainer's thread until the study has run a coroutine; return its result."""
        assert threading.current_thread() is self._thread, "only the work itself pauses"
        self.pending = work
        self._paused.release()
        self._resumed.acquire()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._paused.release()


def shared_state() -> tuple[Any, ...]:
    """Random numbers, and how far gradients are accumulated: accelerate keeps that once for a process."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    accumulated = {name: copy.copy(value) for name, value in GradientState._shared_state.items()}
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_devices, accumulated


def set_shared_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])
    GradientState._shared_state.clear()
    GradientState._shared_state.update(state[4])


@contextmanager
def kept_accelerator() -> Iterator[None]:
    """Leave accelerate's state of the process as it is: a config that is made without a trainer clears it."""
    shared = [(one._shared_state, dict(one._shared_state)) for one in (AcceleratorState, PartialState)]
    try:
        yield
    finally:
        for current, before in shared:
            current.update(before)
