"""An environment: the policy opens a safe with a tool; `get_reward` makes the environment its own reward.

Every rollout has a Safe of its own. SmolLM2's chat template shows models no tools, so the prompt begins with an example
of a call; most models of today need none.
"""

import json

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer


class Safe:
    """Opens with the right number; each try says whether to go up or down."""

    def reset(self, number, **row):
        self.number, self.tries, self.open = number, 0, False

    def turn(self, to: int) -> str:
        """Turn the dial.

        Args:
            to: A number from 1 to 9.
        """
        self.tries += 1
        self.open = self.open or to == self.number
        return "open" if self.open else "higher" if to < self.number else "lower"

    def get_reward(self):
        """A point for an open safe; for a closed one a little for having tried."""
        return 1.0 if self.open else min(self.tries, 3) / 10


def prompt():
    """An example, and a safe to open. Every prompt is the same; the rows differ in the number."""
    call = json.dumps({"name": "turn", "arguments": {"to": 5}})
    said = [("user", "Open the safe."), ("assistant", call), ("tool", "open"), ("assistant", "Done.")]
    return [{"role": role, "content": text} for role, text in [*said, ("user", "Open the next safe.")]]


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        environment_factory=Safe,
        args=GRPOConfig(
            **settings(options) | {"max_completion_length": 96},
            max_tool_calling_iterations=3,
            tool_parser="json",  # where the template does not say how calls are written
        ),
        train_dataset=[{"prompt": prompt(), "number": number} for number in range(1, 10)],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
