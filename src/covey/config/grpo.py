"""`GRPOConfig`: the settings of `GRPOTrainer`."""

from dataclasses import dataclass
from typing import ClassVar

from covey.config.aliases import takes_old_names
from covey.config.base import OnlineConfig
from covey.config.fields import document


@takes_old_names
@dataclass
class GRPOConfig(OnlineConfig):
    """Settings of group relative policy optimization (GRPO, arXiv 2402.03300) and the losses descended from it.

    The defaults train with the token mean of DAPO (arXiv 2503.14476), advantages scaled within the group, and no KL
    penalty.

    Example:
        >>> GRPOConfig(output_dir="out", per_device_train_batch_size=8, num_generations=8).generation_batch_size
        8
    """

    method: ClassVar[str] = "grpo"


document(GRPOConfig)
