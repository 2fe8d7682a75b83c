"""`Run`: settings, method and services of a run, which every stage of a training step reads."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from covey.algorithms.algorithm import Algorithm
from covey.config.algebra import BatchAlgebra
from covey.config.base import OnlineConfig
from covey.config.rules import check_fields
from covey.data.sources import Sources
from covey.observability.activity import Activity
from covey.observability.metrics import MetricLog, PhaseTimer, Timeline
from covey.runtime.user_code import report
from covey.sizing.memory import Opponents
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.distributed.sharding import Sharding, sharding_of


class Method:
    """The algorithm of a run; a script may change settings of its loss during training."""

    def __init__(
        self,
        args: OnlineConfig,
        make: Callable[[OnlineConfig], Algorithm],
        by_source: Mapping[str, OnlineConfig] | None = None,
    ):
        self._args, self._make = args, make
        self._by_source = by_source or {}  # configs of sources whose completions are compared in their own way
        self.algorithm = make(args)  # advantages, objective and weighting
        self._compared = {name: make(config) for name, config in self._by_source.items()}
        self.changed: dict[str, Any] = {}  # fields of the config that a script has changed, by name

    def of(self, source: str) -> Algorithm:
        """The method by which completions of a source are compared; its loss is the run's."""
        return self._compared.get(source, self.algorithm)

    def correct(self, corrected: Callable[[Algorithm], Algorithm]) -> None:
        """Replace the algorithm by `corrected(algorithm)`, with or without a correction of the engine's mismatch."""
        self.algorithm = corrected(self.algorithm)

    def config(self) -> OnlineConfig:
        """A copy of the config with what a script has changed."""
        return self._with(self._args, self.changed)

    def change(self, field: str, value: Any) -> None:
        """Set a field of the config from this step on; CheckError (a ValueError) for a value that the field refuses."""
        changed = {**self.changed, field: value}
        config = self._with(self._args, changed)
        report(check_fields(config))
        made, correction = self._make(config), self.algorithm.objective.correction
        self.algorithm = replace(made, objective=replace(made.objective, correction=correction))
        self._compared = {name: self._make(self._with(one, changed)) for name, one in self._by_source.items()}
        self.changed = changed

    @staticmethod
    def _with(args: OnlineConfig, changed: dict[str, Any]) -> OnlineConfig:
        config = copy.copy(args)
        for field, value in changed.items():
            setattr(config, field, value)
        return config


@dataclass(frozen=True)
class Run:
    """Parts of a run that stay the same from the first step to the last, and services of this process."""

    args: OnlineConfig
    algebra: BatchAlgebra  # batch sizes
    method: Method
    policy: Any  # the transformers (or PEFT) model without its wrappers
    state: Callable[[], TrainerState]  # of Hugging Face's trainer, which makes another when training begins
    accelerator: Accelerator
    sharding: Sharding
    collectives: Collectives
    metrics: MetricLog
    timeline: Timeline
    activity: Activity
    phases: PhaseTimer
    sources: Sources | None = None  # of training prompts; None: one dataset
    opponents: Opponents | None = None  # copies of the policy that it plays against, for plans of memory
    teacher_bytes: int = 0  # of models that are loaded as teachers, for plans of memory

    def masks_truncated(self, source: str) -> bool:
        """True where nothing is learned from truncated completions of a source."""
        own = None if self.sources is None else self.sources.settings(source).mask_truncated_completions
        return self.args.mask_truncated_completions if own is None else own

    @property
    def algorithm(self) -> Algorithm:
        return self.method.algorithm

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.state().global_step

    @property
    def device(self) -> torch.device:
        return self.accelerator.device


def make_run(
    args: OnlineConfig,
    method: Method,
    policy: Any,
    accelerator: Accelerator,
    state: Callable[[], TrainerState],
    sources: Sources | None = None,
    opponents: Opponents | None = None,
    teacher_bytes: int = 0,
) -> Run:
    """A run with services of its own."""
    rank, size = accelerator.process_index, accelerator.num_processes
    collectives = Collectives(rank, size, float(args.ddp_timeout), lambda: state().global_step)
    timeline, activity = Timeline(), Activity()

    def notice(phase: str) -> None:
        collectives.note(phase)
        activity.begin(phase)

    return Run(
        args=args,
        algebra=args.algebra(args.world_size),
        method=method,
        policy=policy,
        state=state,
        accelerator=accelerator,
        sharding=sharding_of(accelerator),
        collectives=collectives,
        metrics=MetricLog(collectives.named("put the metrics together")),
        timeline=timeline,
        activity=activity,
        phases=PhaseTimer(notice=notice, span=timeline.phase),
        sources=sources,
        opponents=opponents,
        teacher_bytes=teacher_bytes,
    )
