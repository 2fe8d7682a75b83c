"""A rollout function for a whole rollout batch, in TRL's form: all prompts in, a dictionary of lists out.

Every prompt is repeated for each of its completions. Fields other than the required three reach the reward functions
under their own names; here the environment's own reward does.
"""

import re

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer


def play(prompts, trainer):
    completions = trainer.generate_completions(prompts, max_tokens=24)
    return {
        "prompt_ids": [one["prompt_ids"] for one in completions],
        "completion_ids": [one["completion_ids"] for one in completions],
        "logprobs": [one["logprobs"] for one in completions],
        "env_reward": [score(prompt, one["text"]) for prompt, one in zip(prompts, completions, strict=True)],
    }


def score(prompt, text):
    """An environment that knows its task: 1 for the sum of the numbers in the question."""
    expected = sum(map(int, re.findall(r"\d+", prompt[-1]["content"])))
    return float(str(expected) in re.findall(r"\d+", text))


def from_environment(completions, env_reward, **kwargs):
    return env_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=from_environment,
        args=GRPOConfig(**settings(options)),
        train_dataset=SUMS,
        rollout_func=play,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
