"""A study of six variants with ten interventions, killed at random and resumed, against one that is left alone.

    python -m benchmarks.study_kills [--kills 20] [--threads 1]

A study of a tiny random model runs in a process of its own and is ended by SIGKILL at a random moment of its work,
which is one of writing checkpoints more often than not; then it is started again with `train(resume=True)`. Once it has
finished, the adapters of all variants and `study.json` must be the very bytes of the undisturbed study.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"learning_rate": 3e-2, "peft": {"r": 2}},
    "c": {"loss_type": "dr_grpo", "temperature": 0.8},
    "d": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "seed": 7},
    "e": {"method": "rloo", "beta": 0.05},
    "f": {"num_generations": 2, "reward_funcs": "tests.support.runs:digits"},
}
INTERVENTIONS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "stop", {"name": "a"}),
    (3, "clone", {"name": "b", "to": "slower", "learning_rate": 1e-3}),
    (4, "change", {"name": "c", "loss_type": "dapo"}),
    (5, "resume", {"name": "a", "learning_rate": 2e-2}),
    (5, "stop", {"name": "d"}),
    (7, "clone", {"name": "d", "to": "other", "fresh": True}),
    (8, "resume", {"name": "d"}),
    (9, "change", {"name": "slower", "temperature": 0.7}),
    (10, "clone", {"name": "slower", "to": "slowest", "learning_rate": 1e-4}),
    (11, "stop", {"name": "f"}),
]


def run(folder: str, resume: bool) -> None:
    """The study, with interventions in some rounds, or in the next one that begins no sooner than others have ended."""
    from tests.support import tiny
    from tests.support.studies import study

    made = study(Path(folder), VARIANTS, max_steps=8, eval_dataset=tiny.rows(2), eval_steps=3, save_rounds=3)

    def intervene(study: Any) -> list[str]:
        done = sum(len(one.history) for one in study.variants.values())
        for number, kind, words in INTERVENTIONS[done:]:
            if number <= study.round:
                getattr(study, kind)(**words)
        return []

    made.halving = intervene
    print("begun", flush=True)
    made.train(resume=resume)
    print("ended", flush=True)


class Process:
    """The study in a process of its own."""

    def __init__(self, folder: Path, resume: bool):
        words = ["--run", str(folder)] + ["--resume"] * resume
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.study_kills", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "begun\n":
            raise RuntimeError(f"the study in {folder} did not begin; run it by hand with {' '.join(words)}")

    def ended_within(self, seconds: float | None) -> bool:
        """True if it has ended by itself in this time; else it is killed."""
        try:
            if self.process.wait(seconds) != 0:
                raise RuntimeError("the study failed")
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False


def digest(folder: Path) -> dict[str, str]:
    """Of study.json and of each variant's adapter; counts of rounds may differ."""
    state = json.loads((folder / "study.json").read_text())
    found = {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*/adapter_model.safetensors"))}
    found["study.json"] = json.dumps(state["variants"], sort_keys=True).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(given.run, given.resume)
        return
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        process, start = Process(whole, False), time.perf_counter()
        process.ended_within(None)
        seconds, expected = time.perf_counter() - start, digest(whole)
        state = json.loads((whole / "study.json").read_text())["variants"]
        print(f"undisturbed: {seconds:.1f} s, {len(state)} variants, interventions as they were carried out:")
        print("\n".join(f"  {one}: {line}" for one, variant in state.items() for line in variant["history"]))
        source, kills, ends = random.Random(given.seed), 0, 0
        while kills < given.kills:
            shutil.rmtree(killed, ignore_errors=True)
            of_this = 0
            while not Process(killed, of_this > 0).ended_within(
                source.uniform(0, 0.7 * seconds) if kills < given.kills and of_this < 5 else None
            ):
                kills, of_this = kills + 1, of_this + 1
            found, ends = digest(killed), ends + 1
            differ = [one for one in expected if found.get(one) != expected[one]]
            print(
                f"study {ends}, {of_this} kills: {'equal' if found == expected else f'DIFFERENT: {differ}'}", flush=True
            )
            if found != expected:
                shutil.copytree(killed, "runs/study_kills_different", dirs_exist_ok=True)
                shutil.copytree(whole, "runs/study_kills_whole", dirs_exist_ok=True)
                raise SystemExit(1)
    print(f"{kills} kills, {ends} studies: all bit-equal to the undisturbed one")


if __name__ == "__main__":
    main()
