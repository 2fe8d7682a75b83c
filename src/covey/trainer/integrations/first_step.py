"""Time and memory of the first optimizer step next to the plan's; other programs during it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from covey.core.findings import Finding
from covey.observability.record_files import MEASURED
from covey.runtime.files import written_whole
from covey.runtime.process_memory import peak_memory
from covey.runtime.user_code import report
from covey.runtime.waiting import CoreUse, Waiting, cores, used_by_others
from covey.sizing.memory import Opponents, estimate_of, readable


def planned_bytes(args: Any, policy: Any, opponents: Opponents | None, teachers: int = 0) -> int | None:
    """Peak of memory by the formulas of `covey.sizing`; None for a model that they do not know."""
    with suppress(AttributeError, TypeError, ValueError):
        return estimate_of(args, policy, opponents, teachers).peak
    return None


class FirstStep(TrainerCallback):
    """Reports time and memory of the first optimizer step, on the console and in the record.

    Micro-batches are not planned again by what was measured: other cuts round differently, and a repeated run would not
    be the same.
    """

    def __init__(self, planned: int | None, device: torch.device, tell: Callable[[str], None], record: Path | None):
        self._planned, self._device, self._tell, self._record = planned, device, tell, record
        self._began: float | None = None  # clock at the beginning of the step that is measured
        self._measured = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measured = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._measured:
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._measured or self._began is None:
            return
        seconds, self._measured = time.perf_counter() - self._began, True
        peak = peak_memory(self._device)
        libraries = ", without libraries" if self._device.type == "cpu" else ""
        planned = "" if self._planned is None else f" ({readable(self._planned)} were planned{libraries})"
        self._tell(f"first step: {seconds:.1f} s, at most {readable(peak)} of memory{planned}")
        if self._record is not None and (self._record / "run.json").exists():
            found = {"step": state.global_step, "seconds": seconds, "peak_bytes": peak, "planned_bytes": self._planned}
            with written_whole(self._record / MEASURED) as new:
                new.write_text(json.dumps(found))


NEEDED_BY_OTHERS = 0.25  # cores that other programs use, above which threads that do not sleep lose much time


def check_waiting(waiting: Waiting, used: float) -> Iterator[Finding]:
    """A warning if threads of this run wait without sleeping, and other programs use many of its cores."""
    if waiting.late and used > NEEDED_BY_OTHERS:
        yield Finding.warning(
            "threads-spin",
            f"other programs use {used:.1f} of {len(cores())} cores, and threads of this run wait for each other in a"
            " loop instead of asleep, since torch was imported before covey: steps may take many times as long.",
            waiting.advice,
        )


class OtherPrograms(TrainerCallback):
    """Checks during the first optimizer step that no other programs slow threads that wait without sleeping."""

    def __init__(self, waiting: Waiting):
        self._waiting = waiting
        self._before: CoreUse | None = None
        self._looked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._looked:
            self._before = CoreUse.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before is not None and not self._looked:
            self._looked = True
            report(check_waiting(self._waiting, used_by_others(self._before, CoreUse.now())))
