"""Successive halving against running all to the end: the same winner, in what share of the time?

    python -m benchmarks.halving [--tasks sum product ...] [--results benchmarks/halving.json] [--summary]

Five tasks of reasoning-gym, on each a study of eight configurations of SmolLM2-135M-Instruct, twice: all trained to the
end, and with halving (`RULE`), each in a process of its own. The winner is the variant with the highest mean reward in
the last evaluation, on prompts that are not trained on. The time is that of `Study.train`, evaluations included.
Every study is written down at once: an interrupted benchmark continues where it stopped.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import model_path

TASKS: dict[str, tuple[str, dict[str, int]]] = {
    "sum": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "product": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "divisor": ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20}),
    "letters": ("letter_counting", {"min_words": 2, "max_words": 3}),
    "multiple": ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12}),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "1e-6": {"learning_rate": 1e-6},
    "1e-5": {"learning_rate": 1e-5},
    "1e-5,rank=32": {"learning_rate": 1e-5, "peft": {"r": 32, "lora_alpha": 64}},
    "5e-5,dr_grpo": {"learning_rate": 5e-5, "loss_type": "dr_grpo"},
    "5e-4": {"learning_rate": 5e-4},
    "3e-2": {"learning_rate": 3e-2},
    "1e-1,rank=16": {"learning_rate": 1e-1, "peft": {"r": 16}},
    "3e-1,rank=2": {"learning_rate": 3e-1, "peft": {"r": 2, "lora_alpha": 4}},
}
RULE = {"keep": 0.25, "certain": True}
STEPS, EVALUATIONS, HELD_OUT = 16, [2, 4, 8], 32
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "record": "off",
    "logging_steps": 1,
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "peft": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
}


def rows_of(task: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Prompts to train on, and others to compare on."""
    import reasoning_gym

    name, settings = TASKS[task]
    entries = reasoning_gym.create_dataset(name, size=400, seed=1, **settings)
    answers = {entry["question"].strip(): str(entry["answer"]) for entry in entries}
    questions = sorted(answers)
    random.Random(0).shuffle(questions)
    rows = [{"prompt": f"{question}\nAnswer:", "answer": answers[question]} for question in questions]
    if len(rows) < 2 * HELD_OUT:
        raise ValueError(f"{task} has only {len(rows)} different questions")
    return rows[HELD_OUT:], rows[:HELD_OUT]


def right_number(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 if the completion begins with the right number, 0.2 if with another one, else 0."""
    begins = [re.match(r"\s*(-?\d+)(?!\d)", text) for text in completions]
    return [
        0.0 if found is None else 1.0 if found[1] == right else 0.2 for found, right in zip(begins, answer, strict=True)
    ]


def study(task: str, halves: bool, model: str, folder: str) -> dict[str, Any]:
    from covey_tools.study.plan import Halving
    from covey_tools.study.report import comparison
    from covey_tools.study.study import Study

    train, held_out = rows_of(task)
    made = Study(
        model,
        CONFIGS,
        {**SETTINGS, "output_dir": folder},
        reward_funcs=right_number,
        train_dataset=train,
        eval_dataset=held_out,
        eval_steps=EVALUATIONS,
        halving=Halving(**RULE) if halves else None,  # type: ignore[arg-type]
    )
    start = time.perf_counter()
    variants = made.train()
    seconds = time.perf_counter() - start
    winner, _ = comparison({name: one for name, one in variants.items() if one.status == "finished"})
    return {
        "task": task,
        "halving": halves,
        "seconds": round(seconds, 1),
        "winner": winner,
        "steps": {name: one.step for name, one in variants.items()},
        "failed": {name: one.reason for name, one in variants.items() if one.status == "failed"},
        "evaluations": {name: one.evaluations for name, one in variants.items()},
    }


def summary(results: list[dict[str, Any]]) -> str:
    """A table with a line for each task that was run both ways."""
    lines = ["| task | winner of all | mean reward, second | winner of halving | seconds | steps | share of the time |"]
    lines.append("|---|---|---:|---|---:|---:|---:|")
    for task in TASKS:
        sides = {one["halving"]: one for one in results if one["task"] == task}
        if len(sides) < 2:
            continue
        all_, halved = sides[False], sides[True]
        last = {name: sum(r := list(e.values())[-1]) / len(r) for name, e in all_["evaluations"].items() if e}
        best, second = sorted(last.values(), reverse=True)[:2]
        steps = [sum(one["steps"].values()) for one in (all_, halved)]
        lines.append(
            f"| {task} | {all_['winner']} | {best:.3f}, {second:.3f} | {halved['winner']} |"
            f" {all_['seconds']:.0f}, {halved['seconds']:.0f} | {steps[0]}, {steps[1]} |"
            f" {halved['seconds'] / all_['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/halving.json"))
    parser.add_argument("--summary", action="store_true", help="only print the table")
    parser.add_argument("--side", choices=["all", "halving"], help="one study, in this process")
    given = parser.parse_args()
    if given.side:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(study(given.tasks[0], given.side == "halving", model_path(given.model), folder)))
        return
    results = json.loads(given.results.read_text()) if given.results.is_file() else []
    for task in [] if given.summary else given.tasks:
        for side in ("halving", "all"):
            if any(one["task"] == task and one["halving"] == (side == "halving") for one in results):
                continue
            command = [sys.executable, "-m", "benchmarks.halving", "--side", side, "--tasks", task]
            command += ["--model", model_path(given.model)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            given.results.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
            print(f"{task}, {side}: {results[-1]['seconds']} s, {results[-1]['winner']}", flush=True)
    print(summary(results))


if __name__ == "__main__":
    main()
