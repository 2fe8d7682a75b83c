"""Runs that are killed at random moments: the record is whole up to the last step, as a replay of all of it shows.

    python -m benchmarks.record_kills [--trials 30]

A run of a tiny random model with `record="tokens"` is ended by SIGKILL within three seconds of its first rollout batch.
Every file of the record must be readable and none be missing, every logged step must have its tokens, and the losses
of `covey replay` must be the same, bit by bit. The exit status is 1 if that is not so once.
"""

import argparse
import contextlib
import io
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from covey.cli.main import main as covey
from covey.observability.record_files import FOLDER, files, number_of, read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_kills", description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--run", type=Path, help="be the run, in this folder")
    given = parser.parse_args()
    if given.run:
        train(given.run)
        return 0
    chance, whole = random.Random(0), 0
    for number in range(given.trials):
        with tempfile.TemporaryDirectory(prefix="covey-kill-") as folder:
            run = Path(folder, "run")
            after = killed(run, chance.uniform(0.0, 3.0))
            steps, problem = examined(run)
        whole += not problem
        print(f"{number + 1:>3}: killed after {after:.2f} s and {steps} steps: {problem or 'whole'}", flush=True)
    print(f"{whole} of {given.trials} records are whole, and their replays equal.")
    return int(whole < given.trials)


def train(folder: Path) -> None:
    import torch
    from tests.support import runs, tiny
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(folder.parent / "model"))
    runs.trainer(folder, parts={"model": model}, record="tokens", max_steps=2000, logging_steps=1).train()


def killed(run: Path, seconds: float) -> float:
    """Start a run, and kill it this long after its first rollout batch is on record."""
    command = [sys.executable, "-m", "benchmarks.record_kills", "--run", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not files(run / FOLDER):
            assert process.poll() is None, "the run has ended by itself"
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    return seconds


def examined(run: Path) -> tuple[int, str]:
    """Logged steps, and what is wrong with the record."""
    record = run / FOLDER
    logged = [line["step"] for line in read_metrics(record) if "loss" in line]
    rollout_batches, updates = (
        [number_of(path) for path in files(record, kind=kind)] for kind in ("generation", "update")
    )
    for path in record.glob("[gu]*.parquet"):
        pq.read_table(path)
    if rollout_batches != list(range(len(rollout_batches))) or updates != list(range(1, len(updates) + 1)):
        return len(logged), f"gaps: rollout batches {rollout_batches}, updates {updates}"
    if logged != list(range(1, len(logged) + 1)) or not len(updates) - 1 <= len(logged) <= len(updates):
        return len(logged), f"{len(updates)} updates, and the steps {logged} are logged"
    if not logged:
        return 0, ""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = covey(["replay", str(run)])
    equal = f"{len(logged)} of {len(logged)} logged steps have the same" in output.getvalue()
    return len(logged), "" if status == 0 and equal else output.getvalue()[-300:]


if __name__ == "__main__":
    sys.exit(main())
