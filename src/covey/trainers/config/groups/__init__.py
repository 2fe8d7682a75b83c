"""The fields that GRPO and RLOO share, in groups by theme; each field is declared, typed and described once, here.

A group is a dataclass of fields and nothing else. To add a field, put it in the group it belongs to: it is then a
constructor keyword, a YAML key, a command-line flag and a line of `-h`. Rules that tie fields together live in
`covey.trainers.checks`.
"""

from covey.trainers.config.groups.engines import ContinuousBatchingFields, MismatchFields, SglangFields, VllmFields
from covey.trainers.config.groups.model import BatchFields, ModelFields, TrainingDefaults
from covey.trainers.config.groups.objective import EntropyFields, KLFields, LossFields, RewardFields
from covey.trainers.config.groups.prompts import PromptFields
from covey.trainers.config.groups.reporting import LoggingFields
from covey.trainers.config.groups.sampling import AgentFields, GenerationFields, SpeculationFields

__all__ = [
    "AgentFields",
    "BatchFields",
    "ContinuousBatchingFields",
    "EntropyFields",
    "GenerationFields",
    "KLFields",
    "LoggingFields",
    "LossFields",
    "MismatchFields",
    "ModelFields",
    "PromptFields",
    "RewardFields",
    "SglangFields",
    "SpeculationFields",
    "TrainingDefaults",
    "VllmFields",
]
