"""`RunContext`: settings, services and state of a run that every phase of a training step reads."""

from typing import Any, Protocol

import torch
from accelerate import Accelerator
from transformers import TrainerState

from covey.algorithms.algorithm import Algorithm
from covey.config.base import OnlineConfig
from covey.observability.activity import Activity
from covey.observability.metrics import MetricLog, PhaseTimer, Timeline
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.distributed.sharding import sharding_of


class TrainingLoop(Protocol):
    """Attributes of Hugging Face's trainer, which it may replace while it runs."""

    state: TrainerState
    model: Any
    model_wrapped: Any
    optimizer: Any
    train_dataset: Any
    is_in_train: bool

    @property
    def policy(self) -> Any: ...  # the transformers (or PEFT) model without its wrappers


class RunContext:
    def __init__(self, loop: TrainingLoop, accelerator: Accelerator, args: OnlineConfig, algorithm: Algorithm):
        self.args = args
        self.algebra = args.algebra(args.world_size)  # batch sizes
        self.algorithm = algorithm  # advantages, objective and weighting
        self.changed: dict[str, Any] = {}  # fields of the config that a script has changed since, by name
        self.loop, self.accelerator, self.sharding = loop, accelerator, sharding_of(accelerator)
        rank, size = accelerator.process_index, accelerator.num_processes
        self.collectives = Collectives(rank, size, float(args.ddp_timeout), lambda: loop.state.global_step)
        self.metrics = MetricLog(self.collectives.named("put the metrics together"))
        self.timeline = Timeline()
        self.activity = Activity()
        self.phases = PhaseTimer(notice=self._notice, span=self.timeline.phase)
        self.earlier: set[str] = set()  # names of checkpoints in output_dir that another run left there

    def _notice(self, phase: str) -> None:
        self.collectives.note(phase)
        self.activity.begin(phase)

    @property
    def training(self) -> bool:
        """False while an evaluation runs."""
        return bool(self.loop.model.training)

    @property
    def mode(self) -> str:
        return "train" if self.training else "eval"

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.loop.state.global_step

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def group_size(self) -> int:
        """Completions of each prompt."""
        return self.algebra.num_generations if self.training else self.algebra.eval_group

    @property
    def micro_batch_rows(self) -> int:
        """Completions of one nominal micro-batch of this process."""
        return self.args.per_device_train_batch_size if self.training else self.args.per_device_eval_batch_size
