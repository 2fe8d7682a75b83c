"""`RLOOTrainer`: online training with a leave-one-out baseline."""

from covey.algorithms import rloo
from covey.config.rloo import RLOOConfig
from covey.trainer.trainer import OnlineTrainer


class RLOOTrainer(OnlineTrainer):
    """REINFORCE Leave-One-Out (Ahmadian et al., arXiv 2402.14740).

    See `OnlineTrainer` for the arguments.

    Example:
        ```python
        from datasets import load_dataset
        from covey import RLOOTrainer
        from covey.rewards import accuracy_reward

        trainer = RLOOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=accuracy_reward,
            train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        trainer.train()
        ```
    """

    config_class = RLOOConfig
    make_algorithm = staticmethod(rloo.algorithm)
