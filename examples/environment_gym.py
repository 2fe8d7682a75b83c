"""A gymnasium environment: the policy plays FrozenLake, described in text. `pip install gymnasium`

The prompt shows the board, a word of the answer is the move, and a row of the dataset is a seed.
"""

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rollout.environments import GymEnvironment


def main():
    options = parser(__doc__).parse_args()
    lake = GymEnvironment(
        "FrozenLake-v1",
        actions={"left": 0, "down": 1, "right": 2, "up": 3},
        instructions="Walk from S to G, around the holes H. Say left, right, up or down.",
        invalid_reward=-0.1,  # for an answer that is none of the four
        max_turns=3,
        render_mode="ansi",
        is_slippery=False,
        desc=["SFG", "FHF"],  # two steps to the right
    )
    trainer = GRPOTrainer(
        model=options.model,
        environment_factory=lake,
        train_dataset=lake.dataset(16),
        args=GRPOConfig(**settings(options) | {"max_completion_length": 96}),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
