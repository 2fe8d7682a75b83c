"""A run of thousands of steps of a tiny model: memory, threads, open files and size of its output stay level.

    python -m benchmarks.long_run                     # 2,000 steps, some minutes
    python -m benchmarks.long_run --mode environments --steps 500

Rollouts are sampled by the built-in engine (`plain`) or act in environments with a scripted one. Every tenth step is
logged, with its completions on record; every 50th is evaluated and saved, of which the two newest checkpoints stay. One
reward fails for some completions, and a tracker in each of its logs. The page is written more often than usual: drawing
takes 80 MiB once, over its first ten times. Of the second half of the readings a line is fitted: what a step
adds. With `--trace` the Python objects and allocations of each quarter are compared with those of the quarter before,
which takes twice as long.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transformers import TrainerCallback
from transformers.integrations import integration_utils

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "tools")]

from golden import configurations as golden  # noqa: E402
from golden import parts  # noqa: E402

from covey.trainer.integrations import report  # noqa: E402

READINGS = 20
COLUMNS = ("step", "memory, MiB", "threads", "open files", "output, KiB", "ms per step")
COUNTER = golden.conversation([parts.call("add", by=2), parts.call("add", by=5), "no"], ["done "])
COUNTER["parts"]["environment_factory"] = parts.Counter
PLAIN: dict[str, Any] = {
    "parts": {
        "reward_funcs": [parts.longer, parts.sometimes_fails],
        "eval_dataset": golden.Lazy(lambda: parts.rows(4)),
    },
    "eval_strategy": "steps",
    "eval_steps": 50,
    "per_device_eval_batch_size": 4,
}
MODES: dict[str, dict[str, Any]] = {"plain": PLAIN, "environments": COUNTER}


class Gone(TrainerCallback):
    """A tracker whose server is gone."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")


class Readings(TrainerCallback):
    """Reads the process and the output folder now and then."""

    def __init__(self, folder: Path, every: int):
        self.folder, self.every = folder, every
        self.rows: list[tuple[float, ...]] = []
        self.process, self.since = psutil.Process(), (0, time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts.SAMPLES.clear()  # which these reward functions keep, all of them
        if state.global_step % self.every:
            return
        step, now = state.global_step, time.perf_counter()
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        seconds = (now - self.since[1]) / (step - self.since[0])
        memory = self.process.memory_info().rss
        counts = threading.active_count(), self.process.num_fds()
        self.rows.append((step, memory / 2**20, *counts, size / 2**10, seconds * 1000))
        self.since = step, time.perf_counter()


class Growth(TrainerCallback):
    """Types and lines of code whose objects grew in each quarter of the run, most first."""

    def __init__(self, steps: int):
        self.quarter, self.found = max(1, steps // 4), [""]
        self.before: tuple[Counter[str], Any] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.quarter:
            return
        gc.collect()
        skipped = [tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, __file__, "<frozen *")]
        counts = Counter(type(one).__qualname__ for one in gc.get_objects())
        lines = tracemalloc.take_snapshot().filter_traces(skipped)
        if self.before is not None:
            kinds = ", ".join(f"{name} {n:+}" for name, n in (counts - self.before[0]).most_common(8))
            grown = [line for line in lines.compare_to(self.before[1], "lineno") if line.size_diff > 0][:8]
            self.found += [f"Step {state.global_step}: {kinds}", *(f"    {line}" for line in grown)]
        self.before = counts, lines


def slope(rows: list[tuple[float, ...]], column: int) -> float:
    """Growth of a column in 1,000 steps, over the second half of the rows."""
    half = np.array(rows[len(rows) // 2 :])
    return float(np.polyfit(half[:, 0], half[:, column], 1)[0] * 1000)


def measure(mode: str, steps: int, folder: Path, growth: Growth | None = None) -> list[tuple[float, ...]]:
    integration_utils.INTEGRATION_TO_CALLBACK["gone"] = Gone
    settings = {
        "max_steps": steps,
        "logging_steps": 10,
        "log_completions": True,
        "save_strategy": "steps",
        "save_steps": 50,
        "save_total_limit": 2,
        "report_to": ["gone"],
        "disable_tqdm": True,
    }
    report.SHARE = 0.4
    trainer = golden.trainer(folder, **{**MODES[mode], **settings})
    readings = Readings(folder, max(1, steps // READINGS))
    trainer.add_callback(readings)
    if growth is not None:
        tracemalloc.start()
        trainer.add_callback(growth)
    trainer.train()
    return readings.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    growing = Growth(given.steps) if given.trace else None
    warnings.simplefilter("ignore")
    printed = os.dup(1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a line for each log, and tables of completions
        rows = measure(given.mode, given.steps, Path(folder), growing)
        os.dup2(printed, 1)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(f"{value:,.1f}" if value % 1 else f"{value:,.0f}" for value in row) + " |")
    growth = [f"{slope(rows, column):+,.2f} {COLUMNS[column]}" for column in range(1, 5)]
    print(f"\nIn 1,000 steps of the second half: {', '.join(growth)}.")
    print("\n".join(growing.found) if growing else "")


if __name__ == "__main__":
    main()
