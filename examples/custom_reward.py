"""A reward function: called with keyword arguments, one list entry per completion, one number back for each.

Dataset columns (`answer`) arrive under their own names, and `trainer_state` tells how far training has come: here the
bonus for brevity sets in after a quarter of it.
"""

import re

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import completion_text


def right_and_short(completions, answer, trainer_state, **kwargs):
    """1 for the right first number; later in training, up to 0.5 more for saying nothing else."""
    late = trainer_state.global_step >= trainer_state.max_steps / 4
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion_text(completion).strip()
        numbers = re.findall(r"\d+", text)
        right = bool(numbers) and numbers[0] == expected
        brevity = len(expected) / max(len(text), len(expected))
        scores.append(right + 0.5 * brevity * (right and late))
    return scores


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=right_and_short,
        args=GRPOConfig(**settings(options)),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
