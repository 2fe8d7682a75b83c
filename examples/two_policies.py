"""Two adapters over one model that are trained against each other, at tic-tac-toe: a study of two variants at a table.

Each game is played once: `white` is trained on its own moves and `black` on its own, each with its own optimizer. Both
are evaluated against a player that takes any free cell.
"""

from common import parser, settings
from covey.study import Study, Table, table
from tic_tac_toe import TicTacToe, uniform


def main():
    options = parser(__doc__).parse_args()
    study = Study(
        options.model,
        {"white": {}, "black": {"learning_rate": 1e-4}},
        {
            **{name: value for name, value in settings(options).items() if name != "save_strategy"},
            "learning_rate": 2e-4,
            "scale_rewards": "none",
            "max_completion_length": 256,  # of all turns of a seat
            "max_turn_length": 8,
            "peft": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        },
        train_dataset=[{"prompt": None, "seed": seed} for seed in range(64)],
        eval_dataset=[{"prompt": None, "seed": seed} for seed in range(2)],
        eval_steps=max(1, options.max_steps // 4),
        parts={
            "environment_factory": Table(TicTacToe, {"first": "white", "second": "black"}),
            "eval_seats": {"first": uniform, "second": uniform},  # each plays its own role against these
        },
    )
    study.train()
    print(table(study.variants))
    return study


if __name__ == "__main__":
    main()
