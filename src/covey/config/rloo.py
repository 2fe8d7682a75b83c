"""`RLOOConfig`: the settings of `RLOOTrainer`."""

from dataclasses import dataclass
from typing import ClassVar

from covey.config.aliases import takes_old_names
from covey.config.base import OnlineConfig, as_range
from covey.config.fields import describe_fields, document


@takes_old_names
@dataclass
class RLOOConfig(OnlineConfig):
    """Settings of REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740) and the KL penalty in the reward.

    All fields of `GRPOConfig` are there; the defaults below differ, and two fields are RLOO's own.
    """

    method: ClassVar[str] = "rloo"

    num_generations: int | None = 2
    beta: float = 0.05
    loss_type: str = "rloo"
    kl_estimator: str = "k1"
    normalize_advantages: bool = False
    """Subtract the mean of the whole batch's advantages and divide by their standard deviation."""
    reward_clip_range: tuple[float, float] | None = None
    """Smallest and largest reward; others are clipped, before the KL penalty. On the command line: low,high."""

    def _normalise(self) -> None:
        super()._normalise()
        self.reward_clip_range = as_range(self.reward_clip_range)


describe_fields(__name__)
document(RLOOConfig)
