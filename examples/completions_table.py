"""Completion tables: completions on the console, in the files that TRL writes, and (if configured) in a tracker.

A reward function adds columns with `log_extra` and numbers to the log with `log_metric`.
"""

import re

import pyarrow.parquet

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import completion_text


def first_number(completions, answer, log_extra, log_metric, **kwargs):
    numbers = [re.search(r"-?\d+", completion_text(completion)) for completion in completions]
    found = [number.group() if number else "" for number in numbers]
    log_extra("expected", answer)
    log_extra("first number", found)
    log_metric("answers/with_a_number", sum(map(bool, found)) / len(found))
    return [float(number == expected) for number, expected in zip(found, answer, strict=True)]


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=first_number,
        args=GRPOConfig(**settings(options), log_completions=True, num_completions_to_print=4, export_completions=True),
        train_dataset=SUMS,
    )
    trainer.train()
    files = sorted((options.output_dir / "completions").glob("*.parquet"))
    table = pyarrow.parquet.read_table(files[-1])
    print(f"{files[-1]}: {table.num_rows} completions with the columns {', '.join(table.column_names)}")
    return trainer


if __name__ == "__main__":
    main()
