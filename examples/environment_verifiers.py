"""An environment of the verifiers library: marble-v1, unmodified. `pip install verifiers marble-v1`

The policy places a piece so that a falling marble bounces through a ring; a simulation decides. Its tasks are the
dataset and its rewards the reward. The settings are verifiers' own: a wide ring, and a point for an answer that follows
the rules, which the environment computes but does not count by itself.
"""

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rollout.environments import VerifiersEnvironment


def main():
    options = parser(__doc__).parse_args()
    marble = VerifiersEnvironment(
        "marble-v1",
        options={"ring_half_width": 400.0, "task": {"rewards": {"answered_legally": {"weight": 1.0}}}},
    )
    trainer = GRPOTrainer(
        model=options.model,
        environment_factory=marble,
        train_dataset=marble.dataset(32),
        args=GRPOConfig(**settings(options) | {"max_completion_length": 96}),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
