"""Self-distillation: the policy, having read the answer, teaches the policy that has not.

The teacher is an average of the policy over its last steps. It reads the prompt with a worked answer of the row (the
column `privileged_context`) and then the policy's own completion, so that each token gets a signal of its own.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward

HINT = "{prompt}\n\nA colleague answered: {context}\n\nAnswer in your own words."


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **settings(options),
            teacher="follower",
            teacher_mixup_alpha=0.05,
            teacher_prompt_template=HINT,
            teacher_loss="divergence",
            teacher_clip=5.0,
        ),
        train_dataset=[{**row, "privileged_context": row["answer"]} for row in SUMS],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
