"""Evaluation on held-out prompts, by name, each set with its own sampling settings.

`sums` is answered greedily; of each of `differences` eight completions say how often one of k is right (pass@k) and how
often the most frequent answer is (maj@k). Every share has an interval: `eval_differences_pass@8_low`, `..._high`.
"""

from common import SUMS, parser, settings
from covey import EvalSuite, GRPOConfig, GRPOTrainer
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
        ),
        train_dataset=SUMS[:-8],
        eval_dataset={
            "sums": EvalSuite(SUMS[-8:], temperature=0, pass_at=1),
            "differences": EvalSuite(DIFFERENCES, num_generations=8, temperature=0.7, pass_at=(1, 8), maj_at=8),
        },
    )
    trainer.train()
    metrics = trainer.evaluate()
    print({name: round(value, 3) for name, value in metrics.items() if "@" in name})
    return trainer


if __name__ == "__main__":
    main()
