"""Hyperparameter search: three short trials with optuna from the same weights, and a run with the best settings.

Needs optuna: pip install optuna.
"""

import optuna

from common import SUMS, parser, settings
from covey import EvalSuite, GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def space(trial):
    """Search space of a trial: any fields of the config."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_generations": trial.suggest_categorical("num_generations", [4, 8]),
    }


def main():
    options = parser(__doc__).parse_args()
    tried = GRPOConfig(**settings(options), eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=8)
    held_out = EvalSuite(SUMS[-8:], temperature=0)
    trainer = GRPOTrainer(
        model=options.model,  # loaded again for each trial
        reward_funcs=numeric_match_reward,
        args=tried.with_changes(max_steps=max(1, options.max_steps // 2)),
        train_dataset=SUMS[:-8],
        eval_dataset=held_out,
    )
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=sampler, pruner=pruner)
    print(f"best evaluation reward {best.objective:.3f} with {best.hyperparameters}")
    trained = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=tried.with_changes(**best.hyperparameters),
        train_dataset=SUMS[:-8],
        eval_dataset=held_out,
    )
    trained.train()
    return trained


if __name__ == "__main__":
    main()
