"""A custom loss: one function from ratios and advantages to token losses, registered under a name."""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms import register_loss
from covey.rewards import numeric_match_reward


def squared(x):
    """-(r A - (r - 1)² / 2): a quadratic penalty on leaving r = 1 in place of clipping."""
    return (x.ratio - 1) ** 2 / 2 - x.ratio * x.advantages


def main():
    register_loss("squared", squared)
    options = parser(__doc__).parse_args()
    args = GRPOConfig(**settings(options), loss_type="squared", num_iterations=2)
    trainer = GRPOTrainer(options.model, numeric_match_reward, args, train_dataset=SUMS)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
