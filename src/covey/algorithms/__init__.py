"""Methods as values: GRPO and its family, RLOO, and the table of losses."""

from covey.algorithms import grpo, rloo
from covey.algorithms.algorithm import LOSS_TYPES, Algorithm, LossType, register_loss

__all__ = ["LOSS_TYPES", "Algorithm", "LossType", "grpo", "register_loss", "rloo"]
