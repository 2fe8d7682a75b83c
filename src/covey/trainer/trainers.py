"""`GRPOTrainer` and `RLOOTrainer`: `OnlineTrainer` with the algorithm and config of a method."""

import inspect

from covey.algorithms import grpo, rloo
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.trainer.integrations.attributes import add_attributes
from covey.trainer.trainer import OnlineTrainer

ARGUMENTS = (inspect.getdoc(OnlineTrainer) or "").partition("\n\n")[2]

add_attributes(OnlineTrainer)


class GRPOTrainer(OnlineTrainer):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and the losses descended from it.

    Example:
        ```python
        from datasets import load_dataset
        from covey import GRPOTrainer
        from covey.rewards import accuracy_reward

        trainer = GRPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=accuracy_reward,
            train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        trainer.train()
        ```
    """

    config_class = GRPOConfig
    make_algorithm = staticmethod(grpo.algorithm)


class RLOOTrainer(OnlineTrainer):
    """REINFORCE Leave-One-Out (Ahmadian et al., arXiv 2402.14740).

    It is made and used like `GRPOTrainer`, whose documentation has an example.
    """

    config_class = RLOOConfig
    make_algorithm = staticmethod(rloo.algorithm)


for kind in (GRPOTrainer, RLOOTrainer):  # `help()` of a class shows its own text alone
    kind.__doc__ = f"{inspect.getdoc(kind)}\n\n{ARGUMENTS}"
