"""Methods as values: GRPO and its family, RLOO, and the tables of losses and advantages."""

from covey.algorithms import grpo, rloo
from covey.algorithms import published as published
from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType
from covey.algorithms.registered import ADVANTAGES, register_advantages, register_loss

__all__ = ["ADVANTAGES", "LOSS_TYPES", "Algorithm", "LossType", "grpo", "register_advantages", "register_loss", "rloo"]
