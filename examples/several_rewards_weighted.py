"""Several rewards for every completion: a weighted sum, or each normalised within its group before they are added.

Some built-in rewards are factories that take settings (`get_...`). With `multi_objective_aggregation=
"normalize_then_sum"` (GDPO) a reward with a large spread cannot drown one with a small spread.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[
            numeric_match_reward,
            get_soft_overlong_punishment(max_completion_len=32, soft_punish_cache=16),
            get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        ],
        args=GRPOConfig(
            **settings(options),
            reward_weights=[1.0, 0.5, 0.25],
            multi_objective_aggregation="normalize_then_sum",
        ),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
