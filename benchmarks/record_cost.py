"""Cost of the record: seconds of a step and bytes of a token, in the demo and in W1.

    python -m benchmarks.record_cost [--steps 4]

Real training steps of SmolLM2-135M with `record="tokens"` and with `record="rollouts"`. The recorder's own calls are
timed within the step, so that two noisy runs need not be compared; the first step, which also loads pyarrow, is apart.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.libraries import Forced, build
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import WORKLOADS
from covey.cli.demo import model_folder, settings, sums
from covey.observability.record_files import files, read_rows

COLUMNS = ("workload", "record", "ms per step", "of the step", "first step, ms", "bytes per token", "tokens per step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4, help="of each run, after the first")
    steps = parser.parse_args().steps
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}")
    for make in (demo, w1):
        for record in ("tokens", "rollouts"):
            with tempfile.TemporaryDirectory() as folder:
                trainer = make(Path(folder), record, 1 + steps)
                print(f"| {make.__name__} | {record} | {' | '.join(cost(trainer))} |", flush=True)


def demo(folder: Path, record: str, steps: int) -> Any:
    from covey import GRPOTrainer
    from covey.rewards import numeric_match_reward

    args = settings(folder, 0, steps, record=record)
    return GRPOTrainer(str(model_folder()), numeric_match_reward, args=args, train_dataset=sums(0)[0])


def w1(folder: Path, record: str, steps: int) -> Any:
    forced, workload = Forced(), WORKLOADS["W1"]
    forced.lengths = workload.lengths(1)
    options = {"record": record, "max_steps": steps}
    return build("covey", workload, str(model_folder()), folder, options, forced, Stopwatch())


def cost(trainer: Any) -> list[str]:
    """Train; cells of the table."""
    recorder, spent, starts = trainer.recorder, [0.0], []
    calls = [(recorder, "add"), (recorder, "on_step_end"), (recorder, "on_log")]
    for owner, name in [*calls, (recorder.updates, "on_micro_batch")] if recorder.updates else calls:
        setattr(owner, name, timed(getattr(owner, name), spent))

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            starts.append(time.perf_counter())
            spent.append(0.0)

    trainer.add_callback(Steps())
    trainer.train()
    _, first, *later = spent
    mine, whole = sum(later) / len(later), (time.perf_counter() - starts[1]) / len(later)
    size = sum(path.stat().st_size for path in recorder.folder.glob("[gu]*.parquet"))
    tokens = sum(row["length"] for path in files(recorder.folder) for row in read_rows(path))
    cells = (f"{1e3 * mine:.0f}", f"{mine / whole:.2%}", f"{1e3 * first:.0f}", f"{size / tokens:.1f}")
    return [*cells, f"{tokens / len(starts):.0f}"]


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[-1] += time.perf_counter() - start

    return wrapped


if __name__ == "__main__":
    main()
