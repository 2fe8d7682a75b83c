"""The most that a study could gain if the updates of its variants were one batch.

    python -m benchmarks.study_updates [--variants 8] [--rounds 3]

The variants of a study share a frozen base, and are updated one after another. In one batch, with each row under its
own adapter, the base would compute the same numbers in products of more rows, and nothing else is saved. An update of
k times the rows with one adapter is a bound for it, because k adapters in one batch take longer than one. Printed is
its time as a share of k updates with the rows of one variant: the share that is missing from 1 is the most to gain.
Both sides take turns in one process, and the first step of each is left out.
"""

import argparse
import statistics
import tempfile
from typing import Any

import torch

from benchmarks.halving import SETTINGS, TASKS, rows_of
from benchmarks.machine import describe, model_path

STEPS = 4  # of a run, of which the first is left out
LENGTHS = (3, 64)  # tokens of a completion: of the tasks of `benchmarks.halving`, and of a short answer


def seconds(model: str, rows: int, tokens: int) -> list[float]:
    """Seconds of the updates of a run with so many completions in a step, all of one length."""
    from peft import LoraConfig

    from covey import GRPOConfig, GRPOTrainer

    settings = {name: value for name, value in SETTINGS.items() if name != "peft"}
    generation = {"min_tokens": tokens}
    changes = {"max_steps": STEPS, "per_device_train_batch_size": rows, "max_completion_length": tokens}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            _varied,
            GRPOConfig(
                **{**settings, **changes, "output_dir": folder, "save_strategy": "no", "disable_tqdm": True},
                generation_kwargs=generation,
            ),
            rows_of(next(iter(TASKS)))[0],
            peft_config=LoraConfig(task_type="CAUSAL_LM", **SETTINGS["peft"]),
        )
        trainer.train()
        return [log["phase/train"] for log in trainer.state.log_history if "phase/train" in log][1:]


def _varied(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Every completion of a group gets another reward, so that all rows have a gradient."""
    return [float(number) for number in range(len(completion_ids))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, rows = model_path(options.model), SETTINGS["per_device_train_batch_size"]
    print(describe(torch.get_num_threads()))
    for tokens in LENGTHS:
        shares = []
        for _ in range(options.rounds):
            one, together = (statistics.median(seconds(model, count * rows, tokens)) for count in (1, options.variants))
            shares.append(together / (options.variants * one))
            print(f"{tokens} tokens: {one:.3f} s for {rows} rows, {together:.3f} s for {options.variants * rows}")
        print(f"{tokens} tokens: one batch takes at least {statistics.median(shares):.2f} of the time")


if __name__ == "__main__":
    main()
