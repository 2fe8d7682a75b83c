"""Evaluation on held-out prompts, by name: completions are sampled and scored as in training, without an update.

The metrics are those of training with a prefix: `eval_sums_reward`, `eval_differences_completions/mean_length`, ...
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward

DIFFERENCES = [
    {"prompt": [{"role": "user", "content": f"What is {a} - {b}? Answer with the number only."}], "answer": str(a - b)}
    for a, b in [(9, 4), (7, 2), (8, 8), (6, 1)]
]


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **settings(options),
            eval_strategy="steps",
            eval_steps=10,
            per_device_eval_batch_size=8,
            num_generations_eval=2,
        ),
        train_dataset=SUMS[:-8],
        eval_dataset={"sums": SUMS[-8:], "differences": DIFFERENCES},
    )
    trainer.train()
    metrics = trainer.evaluate()
    print({name: round(value, 3) for name, value in metrics.items() if name.endswith("_reward")})
    return trainer


if __name__ == "__main__":
    main()
