"""`DistillationConfig`: the settings of `DistillationTrainer`."""

from dataclasses import dataclass
from typing import ClassVar

from covey.config.aliases import takes_old_names
from covey.config.fields import document
from covey.config.grpo import GRPOConfig


@takes_old_names
@dataclass
class DistillationConfig(GRPOConfig):
    """Settings of on-policy distillation without rewards: each prompt gets one completion, which a teacher scores.

    All fields of `GRPOConfig` are there; only the defaults below differ. The keyword `beta` of TRL's class is
    `teacher_beta`; the field `beta` is the KL penalty of other methods, 0 here.
    """

    other_names: ClassVar[dict[str, str]] = {"beta": "teacher_beta"}
    """Keywords of TRL's class of the same name, and the fields here."""

    num_generations: int | None = 1
    teacher_loss: str = "divergence"
    teacher_top_k: int = -1


document(DistillationConfig)
