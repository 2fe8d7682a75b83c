"""A script for TRL, with its default settings: GRPO on sums of reasoning-gym.

    python benchmarks/trl_script.py MODEL OUTPUT [TOKENS]

`benchmarks.script` runs it as it is and with `covey` for `trl` in its import.
"""

import re
import sys

import reasoning_gym
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, output, *tokens = sys.argv[1:]
sums = reasoning_gym.create_dataset("chain_sum", seed=0, size=512, min_terms=2, max_terms=3, max_digits=2)
rows = [{"prompt": [{"role": "user", "content": one["question"]}], "answer": one["answer"]} for one in sums]


def last_number(completions, answer, **kwargs):
    said = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(numbers[-1:] == [right]) for numbers, right in zip(said, answer, strict=True)]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=last_number,
    args=GRPOConfig(
        output_dir=output,
        gradient_accumulation_steps=8,
        max_completion_length=int(tokens[0]) if tokens else 256,
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
)
trainer.train()
