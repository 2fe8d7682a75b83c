"""The fields that GRPO and RLOO share, in groups by theme; each field is declared, typed and described once, here.

A group is a dataclass of fields and nothing else. To add a field, put it in the group it belongs to: it is then a
constructor keyword, a YAML key, a command-line flag and a line of `-h`. Rules that tie fields together live in
`covey.config.rules.registry`.
"""

from covey.config.groups.engines import ContinuousBatchingFields, MismatchFields, SglangFields, VllmFields
from covey.config.groups.model import BatchFields, ModelFields, TrainingDefaults
from covey.config.groups.objective import EntropyFields, KLFields, LossFields, RewardFields
from covey.config.groups.prompts import PromptFields
from covey.config.groups.reporting import LoggingFields
from covey.config.groups.sampling import AgentFields, GenerationFields, SpeculationFields

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
