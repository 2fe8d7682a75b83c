"""A trainer of either library on a model of `SHAPES`, with forced completion lengths, one step at a time."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import libraries
from benchmarks.gpu import models
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Workload, reward_for, rows


class Finished(BaseException):
    """Ends `train()` after the last step that is wanted."""


class Run:
    """One trainer and the steps it takes.

    Args:
        library: "covey" or "trl".
        workload: lengths and groups of a step.
        shape: name in `models.SHAPES`.
        folder: for output.
        options: config fields that are not left at their defaults; `peft_config` for an adapter.
        device: "cuda" or "cpu".
        dtype: of the weights; float32 if None.
    """

    def __init__(
        self,
        library: str,
        workload: Workload,
        shape: str,
        folder: Path,
        options: dict[str, Any],
        device: str,
        dtype: Any = None,
    ):
        from datasets import Dataset

        self.workload = workload
        self.device = device
        self.forced, self.watch = libraries.Forced(), Stopwatch()
        options = {"bf16": device == "cuda", "use_cpu": device == "cpu", **options}
        extra = {"peft_config": options.pop("peft_config")} if "peft_config" in options else {}
        model = models.model(shape, device, dtype)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        tokenizer = models.tokenizer(model.config.vocab_size)
        kind, config = libraries._trainer_class(library)
        self.trainer = kind(
            model=model,
            reward_funcs=reward_for(workload),
            args=config(**libraries.settings(workload, folder, options)),
            train_dataset=Dataset.from_list(rows(workload, tokenizer, 16)),
            processing_class=tokenizer,
            **extra,
        )
        {"covey": libraries._force_covey, "trl": libraries._force_trl}[library](self.trainer, self.forced)
        {"covey": libraries._time_covey, "trl": libraries._time_trl}[library](self.trainer, self.watch)

    def steps(self, rounds: int, before: Callable[[int], None] = lambda number: None) -> list[dict[str, Any]]:
        """Take a warm-up step and `rounds` measured ones; their records.

        Args:
            rounds: measured steps; the warm-up has number 0.
            before: called with the number of the step about to begin, device idle.
        """
        from transformers import TrainerCallback

        records: list[dict[str, Any]] = []
        run = self

        class Measure(TrainerCallback):
            number = -1
            start = 0.0

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                run.synchronize()
                if self.number < 0:
                    libraries.time_optimizer(run.trainer, run.watch)
                else:
                    records.append(run.measured(self.number, time.perf_counter() - self.start))
                self.number += 1
                before(self.number)
                if self.number > rounds:
                    raise Finished
                run.forced.lengths = run.workload.lengths(self.number) if self.number else run.workload.warm_up()
                run.watch.drain()
                run.reset_peak()
                self.start = time.perf_counter()

        self.trainer.add_callback(Measure())
        with suppress(Finished):
            self.trainer.train()
        return records

    def measured(self, number: int, seconds: float) -> dict[str, Any]:
        """Record of the step that has just ended."""
        self.forced.check()
        phases, _ = self.watch.drain()
        phases["other"] = seconds - sum(value for name, value in phases.items() if name != "other")
        return {"number": number, "seconds": seconds, "phases": phases, **self.memory()}

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Let the peak of allocated memory begin again."""
        import torch

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Bytes that torch's allocator has given out and reserved at most since `reset_peak`."""
        import torch

        if self.device != "cuda":
            return {}
        return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
