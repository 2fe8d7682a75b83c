"""On-policy distillation next to a reward: a teacher scores every token that the policy samples.

The teacher's log-prob minus the policy's is added to the advantage of each token. Give a larger model of the same
family as `--teacher`, or the URL of a server that has one (`covey vllm-serve --model ...` starts it); by default it is
the policy as it was at the start, which keeps the policy near it.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__)
    options.add_argument("--teacher", default="start", help="Hub id, folder or URL of the teacher.")
    options = options.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **settings(options),
            teacher=options.teacher,
            teacher_loss="advantage",
            teacher_coef=0.2,
            teacher_clip=5.0,
        ),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
