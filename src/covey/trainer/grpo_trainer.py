"""`GRPOTrainer`: online training with group-relative advantages."""

from covey.algorithms import grpo
from covey.config.grpo import GRPOConfig
from covey.trainer.trainer import OnlineTrainer


class GRPOTrainer(OnlineTrainer):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and the losses descended from it.

    See `OnlineTrainer` for the arguments.

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
