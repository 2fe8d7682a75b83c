"""A KL penalty towards a reference model that slowly follows the policy (TR-DPO).

With `beta=0`, the default of GRPO, no reference is loaded at all.
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
            beta=0.04,
            kl_estimator="k3",
            sync_ref_model=True,
            ref_model_sync_steps=5,
            ref_model_mixup_alpha=0.6,
        ),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
