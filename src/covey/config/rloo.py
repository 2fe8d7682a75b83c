"""`RLOOConfig`: the settings of `RLOOTrainer`."""

from dataclasses import dataclass
from typing import ClassVar

from covey.config.base import OnlineConfig
from covey.config.groups.describe import described, redefault


@dataclass(repr=False)  # the inherited one hides the servers' keys
class RLOOConfig(OnlineConfig):
    """Settings of REINFORCE with a leave-one-out baseline and the KL penalty in the reward.

    Everything that GRPO can do is there too; only the defaults below and two fields are RLOO's own.
    """

    method: ClassVar[str] = "rloo"

    num_generations: int | None = redefault(OnlineConfig, "num_generations", 2)
    beta: float = redefault(OnlineConfig, "beta", 0.05)
    loss_type: str = redefault(OnlineConfig, "loss_type", "rloo")
    kl_estimator: str = redefault(OnlineConfig, "kl_estimator", "k1")
    normalize_advantages: bool = described(
        False, "Subtract the mean of the whole batch's advantages and divide by their standard deviation."
    )
    reward_clip_range: tuple[float, float] | None = described(
        None, "Smallest and largest reward; others are clipped, before the KL penalty. On the command line: low,high."
    )

    def _normalise(self) -> None:
        super()._normalise()
        self.reward_clip_range = as_range(self.reward_clip_range)


def as_range(value: object) -> tuple[float, float] | None:
    """`reward_clip_range` as two numbers.

    Accepts a pair, text like "-1,1" or "[-1, 1]", and the tuple of single characters that argparse makes of such text.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(part, str) and len(part) == 1 for part in value):
        value = "".join(value)
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    try:
        low, high = (float(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward_clip_range={value!r} is not a pair of numbers; give the smallest and the largest reward, as in "
            "(-1.0, 1.0)."
        ) from error
    return low, high
