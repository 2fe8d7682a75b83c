"""Which settings are best? Three trials with optuna, each a training run of its own from the same fresh weights.

Needs optuna: pip install 'covey[search]'. Returns a trainer that has been trained with the best settings.
"""

import optuna

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def space(trial):
    """What each trial tries: any fields of the config."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_generations": trial.suggest_categorical("num_generations", [4, 8]),
    }


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,  # loaded anew for each trial
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**settings(options), eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=8),
        train_dataset=SUMS[:-8],
        eval_dataset=SUMS[-8:],
    )
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=sampler, pruner=pruner)
    print(f"best evaluation reward {best.objective:.3f} with {best.hyperparameters}")
    trained = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=trainer.args.with_changes(**best.hyperparameters),
        train_dataset=SUMS[:-8],
        eval_dataset=SUMS[-8:],
    )
    trained.train()
    return trained


if __name__ == "__main__":
    main()
