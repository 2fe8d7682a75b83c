"""A library in a process of its own, which runs one training step per command and sleeps in between.

Commands come as JSON lines on standard input, answers go as JSON lines to what was standard output; everything else
that is printed goes to standard error. The first line holds what to build (`Worker.__init__` in `benchmarks.pool`),
each further one the completion lengths of a step. A step's time runs from the beginning of an optimizer step to the
beginning of the next, so that logging and fetching data are in it and waiting for commands is not.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import available_memory, total_memory
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Workload

PHASES = ("generate", "score", "train", "optimizer", "other")


NEEDED_BY_OTHERS = 0.25
"""Share of the machine's memory that a sleeping process leaves to the others."""


def make_room() -> None:
    """Give freed memory back to the system if the others may need it.

    Otherwise it stays allocated, as in any training run: only a first step has to map every page.
    """
    gc.collect()
    if available_memory() < NEEDED_BY_OTHERS * total_memory():
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak_memory() -> None:
    """Let the peak begin again at what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Largest resident size since `reset_peak_memory`, in bytes: weights, gradients, optimizer and everything else."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class Replies:
    """The way back to the parent."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the log

    def send(self, **content: Any) -> None:
        """One answer."""
        print(json.dumps(content), file=self._out, flush=True)


def train(spec: dict[str, Any], replies: Replies) -> None:
    """Build the trainer and hand it over to the commands."""
    from benchmarks.libraries import Forced, build, time_optimizer

    forced, watch = Forced(), Stopwatch()
    workload = Workload(**spec["workload"])
    folder = Path(spec["folder"])
    trainer = build(spec["library"], workload, spec["model"], folder, spec["options"], forced, watch)
    trainer.add_callback(step_on_command(replies, forced, watch, lambda: time_optimizer(trainer, watch)))
    trainer.train()


def run_script(spec: dict[str, Any], replies: Replies) -> None:
    """Run a script that is written for TRL with the library in TRL's place, step by step on command."""
    from transformers.trainer import DEFAULT_CALLBACKS

    from benchmarks.libraries import Forced

    DEFAULT_CALLBACKS.append(step_on_command(replies, Forced(), Stopwatch(), lambda: None))
    path = Path(spec["script"])
    source = path.read_text().replace("from trl import", f"from {spec['library']} import")
    sys.argv = [str(path), spec["model"], spec["folder"], *spec["arguments"]]
    exec(compile(source, path, "exec"), {"__name__": "__main__"})


def step_on_command(replies: Replies, forced: Any, watch: Stopwatch, begun: Callable[[], None]) -> Any:
    """A callback that waits for a command before every optimizer step.

    Args:
        replies: where measurements go.
        forced: holds the lengths of the coming step.
        watch: takes the times of phases.
        begun: called when training has begun.
    """
    from transformers import TrainerCallback

    class StepOnCommand(TrainerCallback):
        start: float | None = None

        def on_step_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
            if self.start is None:
                begun()
                replies.send(ready=True, settings=chosen(args))
            else:
                measured = self.measured(time.perf_counter() - self.start)
                make_room()
                replies.send(**measured)
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # nothing to save
            forced.lengths = json.loads(line)["lengths"]
            reset_peak_memory()
            watch.drain()
            self.start = time.perf_counter()

        def measured(self, seconds: float) -> dict[str, Any]:
            forced.check()
            phases, positions = watch.drain()
            phases["other"] = seconds - sum(phases.get(name, 0.0) for name in PHASES if name != "other")
            return {"seconds": seconds, "phases": phases, "positions": positions, "peak_bytes": peak_memory()}

    return StepOnCommand()


def chosen(args: Any) -> dict[str, Any]:
    """The settings that matter for speed and memory, as the library resolved them."""
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "use_transformers_continuous_batching",
        "attn_layout",
        "max_tokens_per_micro_batch",
        "loss_type",
        "optim",
    )
    return {name: value for name in names if isinstance(value := getattr(args, name, None), (str, int, float, bool))}


def multiply(spec: dict[str, Any], replies: Replies) -> None:
    """The machine's peaks: operations a second of a float32 matrix product, and bytes a second that a sum reads."""
    import torch

    n, warm = spec["size"], spec["warm_seconds"]
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    large = torch.ones(64 << 20)
    replies.send(ready=True)
    for _ in sys.stdin:
        until = time.perf_counter() + warm
        while time.perf_counter() < until:
            torch.mm(a, b, out=out)
        product = median_seconds(lambda: torch.mm(a, b, out=out))
        replies.send(flops=2 * n**3 / product, bandwidth=large.nbytes / median_seconds(large.sum))


def median_seconds(work: Callable[[], Any]) -> float:
    """Of five times in a row."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[2]


def main() -> None:
    """Read what to be, and be it."""
    import torch

    replies = Replies()
    spec = json.loads(sys.stdin.readline())
    torch.set_num_threads(spec["threads"])
    role = multiply if spec["library"] == "multiply" else run_script if "script" in spec else train
    role(spec, replies)


if __name__ == "__main__":
    main()
