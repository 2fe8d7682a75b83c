"""Several updates from one rollout batch: cheaper sampling, with importance ratios that move away from 1.

Here a rollout batch of 32 completions is cut into 4 micro-batches, 2 of which make an update, and used twice:
4 updates. From the second on, ratios differ from 1 and clipping can bind; see `clip_ratio/*` in the log. Without
either option the run would be on-policy and nothing could clip.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    args = GRPOConfig(
        **settings(options),
        steps_per_generation=4,
        num_iterations=2,
        epsilon=0.2,
        epsilon_high=0.28,
    )
    algebra = args.algebra()
    print(f"{algebra.updates_per_rollout_batch} updates per rollout batch; on-policy: {algebra.on_policy}")
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=args,
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
