"""Options, a small dataset and settings for a laptop, shared by all examples.

Every example runs as `python examples/NAME.py --model ID_OR_FOLDER --max_steps N --output_dir DIR`. The defaults fit
two CPU cores; nothing but the model is downloaded, and not even that if `--model` is a folder.
"""

import argparse
from pathlib import Path
from typing import Any

SUMS = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}], "answer": str(a + b)}
    for a in range(1, 10)
    for b in range(1, 10)
]
"""81 one-digit sums as conversations, with an `answer` column for the reward function."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every example has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder.")
    options.add_argument("--max_steps", type=int, default=20, help="Optimizer updates.")
    options.add_argument("--output_dir", type=Path, default=Path("runs/example"), help="Where results go.")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Config fields that suit a small machine: 4 prompts with 4 completions each, 16 completions an update."""
    return {
        "output_dir": str(options.output_dir),
        "max_steps": options.max_steps,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 32,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
