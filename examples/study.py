"""A study: four configurations as adapters over one model, sampled in one batch and compared on the same prompts.

The best one is cloned with a lower learning rate halfway, and the table shows both.
"""

from common import SUMS, parser, settings
from covey.rewards import numeric_match_reward
from covey.study import Study, comparison, table


def main():
    options = parser(__doc__).parse_args()
    half = max(1, options.max_steps // 2)
    study = Study(
        options.model,
        {
            "base": {},
            "fast": {"learning_rate": 1e-3},
            "wide": {"peft": {"r": 32, "lora_alpha": 64}},
            "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
        },
        {
            **settings(options),
            "learning_rate": 2e-4,
            "peft": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        },
        reward_funcs=numeric_match_reward,
        train_dataset=SUMS[:-8],
        eval_dataset=SUMS[-8:],
        eval_steps=half,
    )

    def clone_the_best(study):
        """Called before each round, as early stopping is; returns the variants to stop, here none."""
        best, _ = comparison(study.variants)
        if best is not None and "clone" not in study.variants and study.variants[best].step == half:
            study.clone(best, "clone", learning_rate=5e-5)
        return []

    study.halving = clone_the_best
    study.train()
    print(table(study.variants))
    return study


if __name__ == "__main__":
    main()
