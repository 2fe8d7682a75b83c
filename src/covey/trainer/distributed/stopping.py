"""The end of a run that was asked to end: on SIGTERM and Ctrl-C."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from transformers import TrainerCallback

STOP_SECONDS = 25.0  # from the signal to the end of the run; Slurm and Kubernetes kill it after 30

RESUMES = "resume_from_checkpoint='auto'"


class Stopped(KeyboardInterrupt):
    """Raised in the main thread when a run that was asked to end is not to wait for the end of its step."""


class StopAtStep(TrainerCallback):
    """On SIGTERM or Ctrl-C, saves a checkpoint at the end of the step and ends the run, on all processes.

    A step that takes longer than `seconds`, or a second Ctrl-C, ends the run without: the last checkpoint stays. A
    checkpoint that is being written then is finished.
    """

    def __init__(self, gather: Callable[[Any, str], list[Any]], enabled: bool, way: str = RESUMES):
        self.gather, self.enabled, self.way, self.seconds = gather, enabled, way, STOP_SECONDS
        self.signal: int | None = None  # by which the run was asked to end
        self._timer: threading.Timer | None = None
        self._deadline, self._owner = math.inf, 0
        self._expired = self._saving = self._agreed = False

    def uncut(self, save: Callable[..., str], *arguments: Any) -> str:
        """Call `save`, whatever the deadline; a run that was to have ended by then ends after it."""
        self._saving = True
        try:
            saved = save(*arguments)
        finally:
            self._saving = False
        if time.monotonic() >= self._deadline and not self._agreed:
            raise Stopped
        return saved

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals in this context that nobody else has taken, and end with the status that they stand for."""
        self.signal, self._timer, self._deadline, self._owner = None, None, math.inf, os.getpid()
        self._expired = self._saving = self._agreed = False
        main = self.enabled and threading.current_thread() is threading.main_thread()
        usual = (signal.SIG_DFL, signal.default_int_handler)
        taken = [number for number in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(number) in usual]
        previous = {number: signal.signal(number, self._ask) for number in taken}
        try:
            with suppress(Stopped):
                yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.signal is not None:
            raise SystemExit(128 + signal.SIGTERM) if self.signal == signal.SIGTERM else KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        expired, self._expired = self._expired, False
        if expired and self._saving:
            return
        if expired or self.signal == number == signal.SIGINT or os.getpid() != self._owner:  # a forked worker
            raise Stopped
        if self.signal is not None:
            return
        self.signal = number
        again = "Ctrl-C again ends the run at once. " if number == signal.SIGINT else ""
        os.write(  # `print` may be at work
            2,
            f"\ncovey: {signal.Signals(number).name}: saving a checkpoint after this step and ending, in at most"
            f" {self.seconds:g} s. {again}{self.way} goes on from there.\n".encode(),
        )
        self._deadline = time.monotonic() + self.seconds
        self._timer = threading.Timer(self.seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        self._expired = True
        os.kill(self._owner, self.signal or signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.enabled:
            return
        asked = [number for number in self.gather(self.signal, "see whether the run is to end") if number is not None]
        if asked:
            self.signal, self._agreed = asked[0], True
            control.should_save = control.should_training_stop = True
