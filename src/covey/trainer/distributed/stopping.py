"""Stopping a run on SIGTERM and Ctrl-C, with a checkpoint of its finished steps."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from covey.runtime.interrupts import LAST_RESORT, Interrupted, Interrupts

STOP_SECONDS = 25.0  # from the signal to the end of the step; Slurm and Kubernetes kill a run after 30
LEAST_SECONDS = 5.0  # of these, however long a checkpoint takes to write


@dataclass
class Finished:
    """The state of a run after its last finished step, from which a checkpoint can still be written."""

    step: int
    method: dict[str, Any]  # of the parts of the trainer
    random: tuple[Any, ...]


class StopAtStep(Interrupts, TrainerCallback):
    """On SIGTERM or Ctrl-C, saves a checkpoint at the end of the step and ends the run, on all processes.

    A second Ctrl-C, or a step that takes longer than `seconds`, ends the step where it is; the finished steps are saved
    if `can_save`. A third Ctrl-C leaves without. On a terminal Ctrl-C has no deadline, as its user decides.
    """

    def __init__(
        self,
        gather: Callable[[Any, str], list[Any]],
        enabled: bool,
        farewell: Callable[[], str] = lambda: "covey: stopped",
        alone: bool = True,
        steps: str = "this step",
    ):
        super().__init__(farewell)
        self.gather, self.enabled, self.alone, self.steps = gather, enabled, alone, steps
        self.seconds = STOP_SECONDS
        self.finished: Finished | None = None
        self.saved_at = -1  # step of the last checkpoint
        self._save_seconds = 0.0  # that the last checkpoint took

    def _reset(self) -> None:
        super()._reset()
        self._agreed = self._saving = self._updating = self._evaluating = False

    def remember(self, finished: Finished) -> None:
        """Keep the state of the last finished step."""
        self.finished = finished

    @property
    def can_save(self) -> bool:
        """True if finished steps are in memory and not in a checkpoint."""
        return self.enabled and self.finished is not None and self.finished.step > self.saved_at

    # ---- answers to signals ------------------------------------------------------------------------------------------

    def on_request(self) -> str:
        term = self.signal == signal.SIGTERM
        name = signal.Signals(self.signal or signal.SIGINT).name
        if self.count == 1 and not self.enabled:
            self.cut = True
            return f"\ncovey: {name}: stopping; nothing is saved, as save_strategy='no'"
        if self.count == 1 and self._evaluating and self.alone:
            self.cut = True
            return f"\ncovey: {name}: stopping the evaluation and saving"
        if self.count == 1:
            limit = ""
            if term or "LOCAL_RANK" in os.environ or not sys.stdin or not sys.stdin.isatty():
                seconds = max(self.seconds - self._save_seconds, min(self.seconds, LEAST_SECONDS))
                self.deadline = time.monotonic() + seconds
                limit = f", in at most {seconds:.2g} s"
            doing = "the checkpoint" if self._saving else "the evaluation" if self._evaluating else self.steps
            saving = "" if self._saving else " and saving a checkpoint"
            return f"\ncovey: {name}: finishing {doing}{saving}{limit}; press Ctrl-C again to stop now"
        if self.count == 2 and self.enabled and (self._saving or self._agreed):
            return "covey: a checkpoint is being saved; press Ctrl-C again to leave without it"
        self.cut = True
        if self.count == 2 and self.enabled:
            return f"covey: stopping now{self._saving_the_rest()}"
        self.end_now(LAST_RESORT if self.count <= 3 else 0.0)
        return "covey: leaving at once"

    def on_deadline(self) -> str:
        self.cut = not self._saving
        return "covey: the time is over" + (
            ": the checkpoint is finished first" if self._saving else f", stopping now{self._saving_the_rest()}"
        )

    def _saving_the_rest(self) -> str:
        if not (self.can_save and self.alone):
            return ""
        assert self.finished is not None
        steps = f"{self.finished.step} finished step" + "s" * (self.finished.step != 1)
        return f" and saving the {steps}; press Ctrl-C again to leave without"

    def is_protected(self) -> bool:
        """True while a checkpoint is written or the weights change, which is finished unless asked a third time."""
        return (self._saving or self._updating) and self.count < 3

    # ---- places of a run ---------------------------------------------------------------------------------------------

    def uncut(self, save: Callable[..., str], *arguments: Any) -> str:
        """Call `save`, whatever the deadline."""
        began, self._saving = time.monotonic(), True
        try:
            saved = save(*arguments)
        finally:
            self._saving = False
        self._save_seconds = time.monotonic() - began
        return saved

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark an evaluation, which a single process may cut short."""
        before = self._evaluating, self._updating
        self._evaluating, self._updating = True, False
        try:
            yield
        finally:
            self._evaluating, self._updating = before

    def leave(self) -> Finished | None:
        """Note that a step was cut short; returns the state to save, if any."""
        self._updating, self.leaving = False, self.cut
        if not (self.cut and self.alone and self.can_save and self.count < 3):
            return None
        return self.finished

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._updating = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finished, self.saved_at = None, state.global_step or -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._updating = False
        if self.signal is not None and self.alone and (self.can_save or self.saved_at == state.global_step):
            self.cut = True  # asked since the last step has ended
            raise Interrupted

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_asked("see whether the run is to end"):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluating and self._is_asked("see whether the run is to end after its evaluation"):
            control.should_save = control.should_training_stop = True

    def _is_asked(self, what: str) -> bool:
        if not self.enabled:
            return False
        asked = [number for number in self.gather(self.signal, what) if number is not None]
        if asked:
            self.signal, self._agreed, self.deadline = asked[0], True, math.inf
        return bool(asked)


def random_state() -> tuple[Any, ...]:
    """States of the random numbers that a checkpoint holds."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_devices


def set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])
