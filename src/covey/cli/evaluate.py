"""`covey eval`: sample and score the evaluation sets of a run file, without training."""

import json
from collections.abc import Sequence
from pathlib import Path

from covey.cli.train import build_trainer, read_run, take_config


def main(argv: Sequence[str]) -> int:
    """Run `covey eval`; returns the exit status.

    Raises:
        ValueError, FileNotFoundError, ImportError: an error that the user can correct.
    """
    if not argv or "-h" in argv or "--help" in argv:
        print("usage: covey eval --config run.yaml [--model FOLDER] [--field value ...]")
        print("Samples and scores the eval_dataset of a run file without training; the file is that of `covey grpo`.")
        print("Prints every estimate, and writes evaluation.json and evaluations/ into output_dir.")
        return 0 if argv else 2
    path, flags = take_config(list(argv))
    run = read_run(path, flags, None, needed=("model", "eval_dataset"))
    trainer = build_trainer(run, training=False)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        assert run.args.output_dir is not None, "transformers fills it in"
        path_of_metrics = Path(run.args.output_dir) / "evaluation.json"
        path_of_metrics.write_text(json.dumps(metrics, indent=2) + "\n")
        print(f"metrics:     {path_of_metrics}")
    return 0
