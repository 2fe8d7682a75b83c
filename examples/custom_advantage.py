"""A custom advantage: one function from rewards to advantages, in the place of GRPO's."""

from dataclasses import replace

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import grpo
from covey.core.advantages import weighted_total
from covey.rewards import numeric_match_reward


def above_median(rewards_PGF, weights_F, kl_PG):
    """R - median of the group, [P, G, F] -> [P, G]: one lucky completion moves the baseline little."""
    rewards_PG = weighted_total(rewards_PGF, weights_F)  # NaN where no function gave a reward
    return (rewards_PG - rewards_PG.nanmedian(dim=1, keepdim=True).values).nan_to_num(0.0).float()


class MedianTrainer(GRPOTrainer):
    make_algorithm = staticmethod(lambda config: replace(grpo.algorithm(config), advantages=above_median))


def main():
    options = parser(__doc__).parse_args()
    args = GRPOConfig(**settings(options))
    trainer = MedianTrainer(options.model, numeric_match_reward, args, train_dataset=SUMS)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
