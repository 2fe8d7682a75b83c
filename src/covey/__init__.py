"""Covey trains language models with group-relative reinforcement learning (GRPO, RLOO and their family).

Names are loaded when first used, so `import covey` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.trainers.grpo_config import GRPOConfig as GRPOConfig
    from covey.trainers.grpo_trainer import GRPOTrainer as GRPOTrainer
    from covey.trainers.rloo_config import RLOOConfig as RLOOConfig
    from covey.trainers.rloo_trainer import RLOOTrainer as RLOOTrainer

__version__ = "0.1.0"

_HOMES = {
    "GRPOConfig": "covey.trainers.grpo_config",
    "GRPOTrainer": "covey.trainers.grpo_trainer",
    "RLOOConfig": "covey.trainers.rloo_config",
    "RLOOTrainer": "covey.trainers.rloo_trainer",
}

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
