"""Completions of an earlier epoch as drafts: tokens that still hold are verified in one pass instead of decoded again.

Eight prompts make two rollout batches, so that each comes back after two updates. `sampling/reused_token_fraction` is
0 in the first epoch; from the second on it is the share not decoded. docs/speed.md defines what `exact` promises.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**settings(options), speculative_reuse="exact"),
        train_dataset=SUMS[:8],
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "sampling/reused_token_fraction" in entry:
            print(f"epoch {entry['epoch']:.1f}: {entry['sampling/reused_token_fraction']:.0%} of the tokens reused")
    return trainer


if __name__ == "__main__":
    main()
