"""Do runs that sample ahead on a thread equal one another, beside busy processes?

    python -m benchmarks.batch_invariance [RUNS] [BUSY]    # default: 100 runs, 3 busy processes

Each run trains a tiny model for six steps two steps ahead, with rewards streamed in every second run and an evaluation
after each step in every third; all must end with the same weights.
"""

import hashlib
import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.support import runs, tiny  # noqa: E402
from tests.support.engines import CopyEngine  # noqa: E402


def busy() -> None:
    x = torch.randn(400, 400)
    while True:
        x = torch.tanh(x @ x)


def weights_of(number: int, folder: str) -> str:
    settings = {"max_steps": 6, "max_staleness": 2, "stream_rewards": number % 2 == 1}
    parts = {"engine": CopyEngine(tiny.model()), "eval_dataset": tiny.rows(2)}
    if number % 3 == 2:
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = runs.trainer(Path(folder), parts=parts, **settings)
    trainer.train()
    digest = hashlib.sha256()
    for weight in runs.weights(trainer):
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def main(count: int = 100, others: int = 3) -> None:
    warnings.simplefilter("ignore")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=busy, daemon=True) for _ in range(others)]
    for process in processes:
        process.start()
    found: dict[str, list[int]] = {}
    try:
        for number in range(count):
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(weights_of(number, folder), []).append(number)
    finally:
        for process in processes:
            process.terminate()
    for digest, numbers in found.items():
        print(f"{digest[:12]}: {len(numbers)} of {count} runs" + ("" if len(found) == 1 else f": {numbers}"))
    sys.exit(len(found) != 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
