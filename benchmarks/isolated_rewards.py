"""Overhead of a reward function that runs in a process of its own: `python -m benchmarks.isolated_rewards`.

Prints the median and 95th percentile of a call of a function that does next to nothing, in the trainer's process and in
a warm worker, and the time that a killed worker takes to be replaced.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from covey.core.records import FinishReason, Rollout
from covey.rewards import RewardContext, RewardSuite, resolve_reward

CALLS = 2000
REWARD = "def lengths(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
TEXT = "The answer is 42. " * 30  # 540 characters


def seconds(suite: RewardSuite, size: int) -> list[float]:
    rollouts = [Rollout([1], list(range(200)), [True] * 200, None, TEXT, FinishReason.STOP)] * size
    rows, context, times = [{"prompt": "q", "answer": "42"}] * size, RewardContext(None, print, print), []
    for _ in range(CALLS):
        start = time.perf_counter()
        suite(rows, rollouts, context)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rewards_of_benchmark.py")
        path.write_text(REWARD)
        measure(resolve_reward(f"{path}:lengths"))


def measure(lengths: Callable[..., list[float]]) -> None:
    print(f"{'completions':>12}{'in the trainer':>24}{'in a worker':>24}{'overhead':>12}   (ms: median, p95)")
    for size in (1, 8, 64):
        columns = []
        for isolation in ("thread", "process"):
            times = seconds(RewardSuite(lengths, isolation=isolation), size)
            columns.append((statistics.median(times) * 1e3, statistics.quantiles(times, n=20)[-1] * 1e3))
        shown = "".join(f"{median:>16.3f}{tail:>8.3f}" for median, tail in columns)
        print(f"{size:>12}{shown}{columns[1][0] - columns[0][0]:>12.3f}")
    suite = RewardSuite(lengths, isolation="process")
    start = time.perf_counter()
    for _ in range(10):
        suite.close()
        suite.functions[0].worker.start()
    print(f"{(time.perf_counter() - start) / 10:.3f} s to end a worker and start another")


if __name__ == "__main__":
    main()
