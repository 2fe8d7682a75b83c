"""A small model learns to use tools that it first misuses: SmolLM2-135M-Instruct and three kinds of arithmetic.

    python -m benchmarks.tools --seeds 0 1 2

The model is asked what 317 times 468 is, or plus, or minus: too much for 135M parameters to do in their head. It has
the tools `add`, `subtract` and `multiply`, and has seen one example, of a multiplication. Untrained, it makes up names
of tools and arguments, or rambles. GRPO rewards the right answer and, half as much, the right call.

Measured on questions that are never trained on, before and after: the share of rollouts whose one and only call is the
right one, the share that end with the right number and nothing else, and the share of both. At temperature 1, as in
training, with 95% intervals that respect that samples share questions; and greedily. Every question of the training
is asked once, so the training curves are of unseen questions as well.

`--calls 2` asks what 345 times 12, minus 140, is, where the second call needs what the first one returns. That is much
harder: untrained, one rollout in 25 begins with the right call, and none of 48 got to the answer. No figures of
training on it have been taken.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, model_path
from benchmarks.records import Records

SAMPLES = 4
"""Rollouts of every held-out question at temperature 1."""

LEARNING: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "gradient_checkpointing": False,
}
"""8 questions with 8 rollouts each, all of them in one optimizer step; the demo's learning rate."""

COLUMNS = ("calls", "answer")
"""Of a row, for the reward functions."""

CURVES = {"rewards/right_calls/mean": "the right calls", "rewards/right_answer/mean": "the right answer"}

ALSO_KEPT = ("completions/mean_length", "tools/call_frequency", "tools/failure_frequency")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract a number from another.

    Args:
        a: What to subtract from.
        b: What to subtract.
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


TOOLS: dict[str, Callable[[int, int], int]] = {"plus": add, "minus": subtract, "times": multiply}


def problem(first: int, *steps: tuple[str, int]) -> dict[str, Any]:
    """A question, the calls that answer it, what they return, and the answer.

    Example:
        `problem(345, ("times", 12), ("minus", 140))` asks "What is 345 times 12, minus 140?"
    """
    text, value, calls, results = f"What is {first}", first, [], []
    for number, (word, operand) in enumerate(steps):
        text += f"{',' if number else ''} {word} {operand}"
        calls.append({"name": TOOLS[word].__name__, "arguments": {"a": value, "b": operand}})
        value = TOOLS[word](value, operand)
        results.append(str(value))
    asked = {"role": "user", "content": f"{text}?"}
    return {"question": asked, "calls": calls, "results": results, "answer": str(value)}


def opening(calls: int) -> list[dict[str, str]]:
    """Prefix of every question: SmolLM2's chat template does not show tools, so the prompt does."""
    example = problem(345, *(("times", 12), ("minus", 140))[:calls])
    messages = [
        {"role": "system", "content": "Use the tools add, subtract and multiply. Answer with the number only."},
        example["question"],
    ]
    for call, result in zip(example["calls"], example["results"], strict=True):
        messages += [{"role": "assistant", "content": json.dumps(call)}, {"role": "tool", "content": result}]
    return [*messages, {"role": "assistant", "content": example["answer"]}]


def questions(
    seed: int, training: int, held_out: int, calls: int = 1
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and to measure with, the operations in turn; no question is there twice.

    Args:
        seed: of the numbers.
        training: how many to train on.
        held_out: how many to measure with.
        calls: that a question takes, 1 or 2.
    """
    chance = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < training + held_out:
        words = [list(TOOLS)[len(rows) % 3], list(TOOLS)[len(rows) // 3 % 3]][:calls]
        *operands, first = sorted(chance.randint(101, 999) for _ in range(calls + 1))
        asked = problem(first, *zip(words, operands, strict=True))
        row = {"prompt": [*opening(calls), asked["question"]], **{column: asked[column] for column in COLUMNS}}
        rows.setdefault(asked["question"]["content"], row)
    return list(rows.values())[held_out:], list(rows.values())[:held_out]


def right_answer(completions: Any, answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the last message is the number and nothing else."""
    return [
        float(completion[-1] == {"role": "assistant", "content": number})
        for completion, number in zip(completions, answer, strict=True)
    ]


def right_calls(completions: Any, calls: Sequence[list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    """The share of the calls that are right before the first wrong one; 0 if more are made than the question takes."""
    scores = []
    for completion, wanted in zip(completions, calls, strict=True):
        made = [call["function"] for message in completion for call in message.get("tool_calls", [])]
        answered = sum(message["role"] == "tool" for message in completion)  # calls that cannot be read, too
        right = [_is_same(*pair) for pair in zip(made, wanted, strict=False)][:answered]
        leading = right.index(False) if False in right else len(right)
        scores.append(leading / len(wanted) if max(len(made), answered) <= len(wanted) else 0.0)
    return scores


def _is_same(call: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """True if a call is the expected one; arguments of sums and products may be swapped."""
    a, b = wanted["arguments"]["a"], wanted["arguments"]["b"]
    orders = [{"a": a, "b": b}] if wanted["name"] == "subtract" else [{"a": a, "b": b}, {"a": b, "b": a}]
    return call["name"] == wanted["name"] and call["arguments"] in orders


def build(
    model: str, train: list[dict[str, Any]], output: Path, seed: int, steps: int, engine: Any = None, **settings: Any
) -> Any:
    """The trainer, which lets as many rounds of calls be made as the questions take.

    Args:
        model: folder.
        train: rows of `questions`, all with as many calls.
        output: folder for completions.
        seed: of sampling and training.
        steps: optimizer steps.
        engine: samples in the place of the built-in one.
        settings: further config fields.
    """
    from covey import GRPOConfig, GRPOTrainer

    rounds = len(train[0]["calls"])
    chosen = LEARNING | {"max_completion_length": 40 + 40 * rounds, "max_tool_calling_iterations": rounds} | settings
    args = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        tool_parser="json",
        reward_weights=[1.0, 0.5],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=seed,
        **chosen,
    )
    return GRPOTrainer(
        model=model,
        tools=list(TOOLS.values()),
        reward_funcs=[right_answer, right_calls],
        args=args,
        train_dataset=train,
        engine=engine,
    )


def learn(
    model: str, seed: int, steps: int, output: Path, held_out: int = 60, calls: int = 1, **settings: Any
) -> dict[str, Any]:
    """Train once, and measure before and after.

    Args:
        model: folder.
        seed: of questions, sampling and training.
        steps: optimizer steps.
        output: folder for completions.
        held_out: questions to measure with.
        calls: that a question takes, 1 or 2.
        settings: further config fields.
    """
    train, test = questions(seed, steps * 8, held_out, calls)
    trainer = build(model, train, output, seed, steps, **settings)
    before = measure(trainer, test, "before", seed)
    start, computed = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, computed = time.perf_counter() - start, time.process_time() - computed
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seed": seed,
        "steps": steps,
        "calls": calls,
        "before": before,
        "after": measure(trainer, test, "after", seed),
        "seconds": round(seconds, 1),
        "core_seconds": round(computed, 1),
        "bf16": bool(trainer.args.bf16),
        "curves": {name: [entry.get(name) for entry in history] for name in (*CURVES, *ALSO_KEPT)},
    }


def measure(trainer: Any, rows: list[dict[str, Any]], name: str, seed: int) -> dict[str, Any]:
    """Shares of right calls, right answers and both over held-out questions, with intervals; and greedily."""
    from covey.cli.demo import clustered_interval
    from covey.core.records import PromptSample

    found: dict[str, Any] = {}
    greedy = replace(trainer.rollouts.params, temperature=0.0)
    for way, params, samples in (("sampled", trainer.rollouts.params, SAMPLES), ("greedy", greedy, 1)):
        draws = [PromptSample(row, number, sample) for number, row in enumerate(rows) for sample in range(samples)]
        rollouts = trainer.collector.collect(draws, params, ("tools", name, way))
        completions = [one.completion or [{"role": "assistant", "content": ""}] for one in rollouts]  # some may fail
        columns = {column: [draw.row[column] for draw in draws] for column in COLUMNS}
        call = [score == 1 for score in right_calls(completions, **columns)]
        answer = [score == 1 for score in right_answer(completions, **columns)]
        both = [c and a for c, a in zip(call, answer, strict=True)]
        found[way] = {
            what: {
                "mean": statistics.mean(right),
                "interval": clustered_interval(right, samples, seed),
            }
            for what, right in (("call", call), ("answer", answer), ("both", both))
        }
    return found


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each seed."""

    def cell(run: dict[str, Any], when: str, what: str) -> str:
        share = run[when]["sampled"][what]
        low, high = share["interval"]
        return f"{share['mean']:.1%} ({low:.1%} to {high:.1%})"

    lines = [
        "| seed | right calls, before | after | right answer, before | after | greedily, before | after | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        shares = [cell(run, when, what) for what in ("call", "answer") for when in ("before", "after")]
        greedy = [f"{run[when]['greedy']['answer']['mean']:.1%}" for when in ("before", "after")]
        lines.append(f"| {run['seed']} | {' | '.join([*shares, *greedy])} | {run['seconds'] / 60:.1f} |")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Shares of right calls and right answers by step in training, and on held-out questions before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axes, (name, label), what in zip(plots, CURVES.items(), ("call", "answer"), strict=True):
        for number, run in enumerate(runs):
            colour, values = f"C{number}", run["curves"][name]
            axes.plot(range(len(values)), values, color=colour, linewidth=1.6, label=f"seed {run['seed']}")
            for when, place in (("before", -1.4), ("after", len(values) - 0.2)):
                share = run[when]["sampled"][what]
                low, high = share["interval"]
                error = [[share["mean"] - low], [high - share["mean"]]]
                axes.errorbar(place + 0.3 * number, share["mean"], error, color=colour, fmt="o", ms=4, capsize=2)
        axes.set(title=f"Rollouts with {label}", xlabel="optimizer steps taken", ylim=(0, 1.02))
        axes.set_xticks(range(0, len(values) + 1, max(1, len(values) // 8)))
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    plots[1].legend(loc="lower right", title="lines: in training\ndots: held out, 95%")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--calls", type=int, default=1, choices=(1, 2), help="that a question takes")
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--output", type=Path, default=Path("runs/tools"), help="for completions and records")
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/tools.png"))
    given = parser.parse_args()
    records = Records(given.output / "records.jsonl")
    alike = {"steps": given.steps, "calls": given.calls}
    for seed in given.seeds:
        if not records.find(seed=seed, **alike):
            folder = given.output / f"seed-{seed}-calls-{given.calls}"
            found = learn(model_path(given.model), seed, given.steps, folder, calls=given.calls)
            records.add(**found, machine=describe(torch_threads()))
    runs = [records.find(seed=seed, **alike)[-1] for seed in given.seeds]
    plot(runs, given.plot)
    print(table(runs))


def torch_threads() -> int:
    """Threads that a run computes with."""
    import torch

    return torch.get_num_threads()


if __name__ == "__main__":
    main()
