"""An endless dataset: any iterable of rows that can be iterated again, such as a streamed `datasets` one.

An iterable has no length, so `max_steps` sets the length of training.
"""

import random

from datasets import IterableDataset

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def questions(seed):
    """Products, made up as they are needed."""
    chance = random.Random(seed)
    while True:
        a, b = chance.randint(2, 9), chance.randint(2, 9)
        yield {"prompt": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": str(a * b)}


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**settings(options)),
        train_dataset=IterableDataset.from_generator(questions, gen_kwargs={"seed": 0}),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
