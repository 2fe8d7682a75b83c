"""GSPO (arXiv 2507.18071): one importance ratio for a whole completion, the geometric mean of its tokens' ratios.

Such ratios move very little, so they are clipped very close to 1. As in the paper, a rollout batch feeds four updates;
only from the second on can anything clip.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **settings(options),
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon=3e-4,
            epsilon_high=4e-4,
            steps_per_generation=8,
        ),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
