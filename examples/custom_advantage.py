"""A custom advantage: one function from rewards to advantages, in the place of GRPO's."""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import register_advantages
from covey.rewards import numeric_match_reward


def above_median(x):
    """R - median of the group, [P, G]: one lucky completion moves the baseline little. NaN is no reward."""
    return x.totals - x.totals.nanmedian(dim=1, keepdim=True).values


def main():
    register_advantages("above_median", above_median)
    options = parser(__doc__).parse_args()
    args = GRPOConfig(**settings(options), advantages="above_median")
    trainer = GRPOTrainer(options.model, numeric_match_reward, args, train_dataset=SUMS)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
