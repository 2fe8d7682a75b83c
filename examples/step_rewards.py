"""Rewards of steps: each sum of a calculation is scored separately, and credited to the tokens that led to it.

A reward function may return `(end, reward)` pairs for a completion instead of one number; `CharEnd` marks where in the
text a step ends. `step_discount` below 1 reduces a step's credit for later rewards; the outcome is scored by a
second function and mixed in with `outcome_weight`.
"""

import re

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import CharEnd, completion_text, numeric_match_reward


def sums_are_right(completions, log_metric, **kwargs):
    """A step for each sum that is written down, such as 12 + 3 = 15: 1 if it is right, else 0."""
    rewards = []
    for completion in completions:
        sums = re.finditer(r"(\d+) *\+ *(\d+) *= *(\d+)", completion_text(completion))
        rewards.append([(CharEnd(m.end()), float(int(m[1]) + int(m[2]) == int(m[3]))) for m in sums])
    log_metric("completions_with_sums", sum(map(bool, rewards)) / max(len(rewards), 1))
    return rewards


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[sums_are_right, numeric_match_reward],
        args=GRPOConfig(**settings(options), process_weight=0.5, outcome_weight=1.0, step_discount=0.9),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
