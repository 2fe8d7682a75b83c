"""Speed of learning with rewards of steps against rewards of outcomes.

    python -m benchmarks.process_supervision

A random, tiny model is shown a letter and has to continue with the alphabet, which has four: after "b" come
"cdabcdab...". A completion has `length` letters, and each run the same budget: so many optimizer steps on so many
completions. What is compared is how completions are rewarded:

- outcome: 1 if all letters are right, else 0;
- sum: the share of right letters, as one number: all that steps know, without saying where;
- steps: a step for each letter, 1 if it is right, compared with all steps of the group (process supervision);
- turns: the same, each letter compared with that place of the siblings (`step_baseline="turn"`);
- steps, γ = 0: as steps, each letter answering for itself alone (`step_discount=0`).

What is shown is the share of a step's samples, taken before its update, that are right throughout. Mean over seeds;
bands from the worst seed to the best.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.letters import tiny_llama, tokenizer, vocabulary_of
from benchmarks.records import Records
from covey import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

LETTERS = "abcd"
VOCABULARY = vocabulary_of(LETTERS)
PROMPTS, GROUP = 8, 16
METHODS: dict[str, dict[str, Any]] = {
    "outcome": {},
    "sum": {},
    "steps": {},
    "turns": {"step_baseline": "turn"},
    "steps, γ = 0": {"step_discount": 0.0},
}
"""Ways to reward, and the settings that go with them."""
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
MASTERED, WINDOW = 0.9, 5
"""A run has learnt the task when the mean of so many steps' shares first reaches this."""


def answer(letter: str, length: int) -> str:
    """Continuation of the alphabet.

    Example:
        >>> answer("b", 5)
        'cdabc'
    """
    first = LETTERS.index(letter) + 1
    return "".join(LETTERS[(first + place) % len(LETTERS)] for place in range(length))


def rights(completion_ids: Sequence[int], wanted: str) -> list[bool]:
    """True for each token of a completion that is the right letter."""
    return [id == VOCABULARY[letter] for id, letter in zip(completion_ids, wanted, strict=False)]


def run(method: str, length: int, seed: int, steps: int, learning_rate: float, algorithm: str) -> dict[str, Any]:
    """Train one model.

    Returns:
        `curve`, the share of each step's samples that are right throughout, and `seconds`.
    """
    curve: list[float] = []

    def reward(completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[Any]:
        right = [rights(ids, wanted) for ids, wanted in zip(completion_ids, answer, strict=True)]
        whole = [len(one) == length and all(one) for one in right]
        curve.append(statistics.fmean(whole))
        if method == "outcome":
            return [float(one) for one in whole]
        if method == "sum":
            return [sum(one) / length for one in right]
        return [[(place, float(is_right)) for place, is_right in enumerate(one)] for one in right]

    trainer_class, config_class = TRAINERS[algorithm]
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about rewards that do not differ, which is what some of this is about
        trainer = trainer_class(
            model=tiny_llama(VOCABULARY),
            reward_funcs=reward,
            args=config_class(
                output_dir=folder,
                seed=seed,
                per_device_train_batch_size=PROMPTS * GROUP,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                max_completion_length=length,
                max_steps=steps,
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                beta=0.0,
                logging_steps=steps,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                **METHODS[method],
            ),
            train_dataset=[{"prompt": letter, "answer": answer(letter, length)} for letter in LETTERS] * 4,
            processing_class=tokenizer(VOCABULARY),
        )
        begun = time.perf_counter()
        trainer.train()
    return {"curve": curve, "seconds": time.perf_counter() - begun}


def steps_to_master(curve: Sequence[float]) -> int | None:
    """Optimizer steps after which a run's samples are right often enough, or None.

    Example:
        >>> steps_to_master([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
        6
    """
    means = [statistics.fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1)]
    return next((WINDOW + number for number, mean in enumerate(means) if mean >= MASTERED), None)


def table(found: dict[tuple[str, int], list[list[float]]]) -> str:
    """Markdown: for each way to reward and length, when runs have learnt, how many of them, and where they end."""
    lengths = sorted({length for _, length in found})
    head = [f"{length} letters: steps to {MASTERED:.0%} | at the end" for length in lengths]
    lines = [f"| rewarded | {' | '.join(head)} |", "|---" * (1 + 2 * len(lengths)) + "|"]
    for method in METHODS:
        cells = []
        for length in lengths:
            curves = found.get((method, length), [])
            reached = [steps for curve in curves if (steps := steps_to_master(curve)) is not None]
            some = "" if len(reached) == len(curves) else f", {len(reached)} of {len(curves)} runs"
            span = f"{statistics.median(reached):g} ({min(reached)} to {max(reached)}{some})" if reached else "never"
            ends = [statistics.fmean(curve[-WINDOW:]) for curve in curves]
            cells += [span, f"{statistics.fmean(ends):.1%}"] if curves else ["", ""]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: dict[tuple[str, int], list[list[float]]], path: Path) -> None:
    """A panel for each length: the share of samples that are right throughout, by optimizer step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({length for _, length in found})
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(4.2 * len(lengths), 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, length in zip(panels[0], lengths, strict=True):
        for number, method in enumerate(METHODS):
            curves = found.get((method, length), [])
            if not curves:
                continue
            by_step = list(zip(*curves, strict=True))
            at = range(len(by_step))
            axes.fill_between(
                at, [min(v) for v in by_step], [max(v) for v in by_step], color=f"C{number}", alpha=0.15, lw=0
            )
            axes.plot(at, [statistics.fmean(v) for v in by_step], color=f"C{number}", linewidth=1.8, label=method)
        axes.set(title=f"{length} letters", xlabel="optimizer steps", ylim=(-0.02, 1.02))
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("samples that are right throughout")
    panels[0][0].legend(loc="lower right", title="rewarded")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Train the missing runs, print the table and plot."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.process_supervision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8], help="letters of a completion")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of a run")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the same for all")
    parser.add_argument("--algorithm", choices=list(TRAINERS), default="grpo")
    parser.add_argument("--output", type=Path, default=Path("runs/process_supervision"), help="for records")
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/process_supervision.png"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(given.output / "records.jsonl")
    found: dict[tuple[str, int], list[list[float]]] = {}
    for length in given.lengths:
        for seed in given.seeds:
            for method in given.methods:
                setting = {
                    "method": method,
                    "length": length,
                    "seed": seed,
                    "steps": given.steps,
                    "learning_rate": given.learning_rate,
                    "algorithm": given.algorithm,
                }
                if not records.find(**setting):
                    records.add(**setting, **run(**setting))
                record = records.find(**setting)[-1]
                found.setdefault((method, length), []).append(record["curve"])
                ends = statistics.fmean(record["curve"][-WINDOW:])
                print(f"{length} letters, {method}, seed {seed}: {ends:.1%}, {record['seconds']:.0f} s", flush=True)
    plot(found, given.plot)
    print("\n" + table(found))


if __name__ == "__main__":
    main()
