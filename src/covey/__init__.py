"""Covey trains language models with group-relative reinforcement learning (GRPO, RLOO and related methods).

Names are loaded when first used, so `import covey` costs nothing.
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import covey.runtime.waiting  # noqa: F401  # before torch, whose threads read the variables that it sets

if TYPE_CHECKING:
    from covey.config.distillation import DistillationConfig as DistillationConfig
    from covey.config.grpo import GRPOConfig as GRPOConfig
    from covey.config.rloo import RLOOConfig as RLOOConfig
    from covey.core.records import FinishReason as FinishReason
    from covey.core.records import Rollout as Rollout
    from covey.rollout.episode import Episode as Episode
    from covey.rollout.episode import EpisodeEngine as EpisodeEngine
    from covey.rollout.episode import Reply as Reply
    from covey.runtime.calling_thread import threaded as threaded
    from covey.runtime.isolation import isolated as isolated
    from covey.trainer.evaluation.suites import EvalSuite as EvalSuite
    from covey.trainer.trainers import DistillationTrainer as DistillationTrainer
    from covey.trainer.trainers import GRPOTrainer as GRPOTrainer
    from covey.trainer.trainers import RLOOTrainer as RLOOTrainer

__version__ = "0.2.0"

# torch takes large tensors of a CPU from huge pages: a step takes 5% less time. It reads this when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# bitsandbytes, which transformers imports, warns of a kernel of its own for 4-bit weights on a CPU
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))

# transformers says in every trainer that it takes over the tokenizer's tokens: once a process is enough
_SAID: set[str] = set()


def _is_new(record: logging.LogRecord) -> bool:
    text, known = str(record.msg), len(_SAID)
    if "PAD/BOS/EOS" in text:
        _SAID.add(text)
    return "PAD/BOS/EOS" not in text or len(_SAID) > known


logging.getLogger("transformers.trainer_utils").addFilter(_is_new)

_HOMES = {
    "DistillationConfig": "covey.config.distillation",
    "DistillationTrainer": "covey.trainer.trainers",
    "Episode": "covey.rollout.episode",
    "EpisodeEngine": "covey.rollout.episode",
    "EvalSuite": "covey.trainer.evaluation.suites",
    "FinishReason": "covey.core.records",
    "GRPOConfig": "covey.config.grpo",
    "GRPOTrainer": "covey.trainer.trainers",
    "RLOOConfig": "covey.config.rloo",
    "RLOOTrainer": "covey.trainer.trainers",
    "Reply": "covey.rollout.episode",
    "Rollout": "covey.core.records",
    "isolated": "covey.runtime.isolation",
    "threaded": "covey.runtime.calling_thread",
}

__all__ = [*_HOMES, "__version__"]


_DISTILLATION = ("GKD", "GOLD", "IWOPD", "SDFT", "SDPO", "AsyncDistillation", "ServerDistillation")
"""Names of TRL's trainers and configs of distillation, without the ending, that Covey does not have."""


def __getattr__(name: str) -> Any:
    if name.removesuffix("Trainer").removesuffix("Config") in _DISTILLATION:
        raise ImportError(
            f"covey has no {name}: use DistillationTrainer and DistillationConfig, or with rewards GRPOTrainer, and the"
            " `teacher_...` settings. The guide 'Coming from TRL' translates the options."
        )
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
