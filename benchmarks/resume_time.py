"""Time from a kill to the first new step, with the demo's model and settings: `python -m benchmarks.resume_time`.

`covey grpo` trains SmolLM2-135M-Instruct on the demo's sums with a checkpoint of 1.6 GB after each step, is ended by
SIGKILL when the first is there, and at once started again with the same command (`--resume auto`). Prints the seconds
from the kill until Covey is imported, the trainer made, and the first new step begun and ended; behind them those that
processors worked for it, which depend less on what else the machine does.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from covey.cli import demo

CHILD = """
import sys, time
from pathlib import Path
def say(what): print(f"@{what} {time.time()} {time.process_time()}", flush=True)
from covey.cli.main import main
from covey.trainer.trainer import OnlineTrainer
say("imported")
train, step, end = OnlineTrainer.train, OnlineTrainer.plan, OnlineTrainer.log
def trained(self, *args, **kwargs):
    say("trainer made")
    return train(self, *args, **kwargs)
def stepped(self, *args, **kwargs):
    say("step begun")
    return step(self, *args, **kwargs)
def logged(self, *args, **kwargs):
    say("step ended")
    return end(self, *args, **kwargs)
OnlineTrainer.train, OnlineTrainer.plan, OnlineTrainer.log = trained, stepped, logged
sys.exit(main(sys.argv[1:]))
"""


def run_file(folder: Path) -> Path:
    """Of the demo, as a user of `covey grpo` writes it."""
    rows, _ = demo.sums(0)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names: tuple[str, ...] = (
        "learning_rate",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
    )
    names += ("max_completion_length", "gradient_checkpointing", "logging_steps", "report_to", "lr_scheduler_type")
    settings = demo.settings(folder / "run", 0, 3)
    run = {name: getattr(settings, name) for name in names}
    run |= {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "output_dir": str(folder / "run")}
    parts = {
        "model": str(demo.model_folder()),
        "dataset": str(folder / "sums.jsonl"),
        "reward_funcs": "numeric_match_reward",
    }
    (folder / "run.yaml").write_text(json.dumps({**parts, **run}, default=str))  # JSON is YAML
    return folder / "run.yaml"


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, "grpo", "--config", str(config), "--resume", "auto"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def resumed(config: Path, checkpoint: Path) -> dict[str, tuple[float, float]]:
    """Seconds from a kill to the first time that each line is printed, and of processors."""
    first = start(config)
    while not checkpoint.exists():
        assert first.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.05)
    time.sleep(1.0)
    first.send_signal(signal.SIGKILL)
    killed = time.time()
    first.wait()
    second, found = start(config), dict[str, tuple[float, float]]()
    assert second.stdout is not None
    for line in second.stdout:
        if line.startswith("@"):
            what, when, worked = line[1:].rsplit(" ", 2)
            found.setdefault(what, (float(when) - killed, float(worked)))
        if "step ended" in found:
            break
    second.kill()
    second.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    for number in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = resumed(run_file(Path(folder)), Path(folder) / "run" / "checkpoint-1")
        shown = ", ".join(f"{what} {wall:.1f} s ({worked:.1f} s)" for what, (wall, worked) in found.items())
        print(f"{number}: {shown}; load average {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
