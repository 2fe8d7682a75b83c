"""`GRPOTrainer` and `RLOOTrainer`: `OnlineTrainer` with the algorithm and config of a method."""

import copy
import inspect
import os
from typing import Any

from covey.algorithms import grpo, rloo
from covey.config.base import teacher_source
from covey.config.distillation import DistillationConfig
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.config.teachers import teachers_on_servers_score_all_tokens
from covey.core.findings import CheckError
from covey.runtime.user_code import report
from covey.trainer.build import resolve_args
from covey.trainer.integrations.attributes import add_attributes
from covey.trainer.teachers import source_of
from covey.trainer.trainer import OnlineTrainer

ARGUMENTS = (inspect.getdoc(OnlineTrainer) or "").partition("\n\n")[2]

add_attributes(OnlineTrainer)


class GRPOTrainer(OnlineTrainer):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and the losses descended from it.

    Example:
        ```python
        from datasets import load_dataset
        from covey import GRPOTrainer
        from covey.rewards import accuracy_reward

        trainer = GRPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=accuracy_reward,
            train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        trainer.train()
        ```
    """

    config_class = GRPOConfig
    make_algorithm = staticmethod(grpo.algorithm)


class RLOOTrainer(OnlineTrainer):
    """REINFORCE Leave-One-Out (Ahmadian et al., arXiv 2402.14740).

    It is made and used like `GRPOTrainer`, whose documentation has an example.
    """

    config_class = RLOOConfig
    make_algorithm = staticmethod(rloo.algorithm)


class DistillationTrainer(GRPOTrainer):
    """On-policy distillation without rewards: a teacher scores the policy's own completions (`docs/teachers.md`).

    `teacher_model` is a model, hub id, folder or URL of a server, in the place of `args.teacher`. All other arguments
    are those of `GRPOTrainer`; with `reward_funcs` the teacher is added to their advantages or loss.

    Example:
        ```python
        from covey import DistillationConfig, DistillationTrainer

        trainer = DistillationTrainer(
            model="Qwen/Qwen3-0.6B",
            teacher_model="Qwen/Qwen3-4B",
            args=DistillationConfig(output_dir="out", beta=0.5),
            train_dataset=rows,
        )
        ```
    """

    config_class = DistillationConfig

    def __init__(
        self, model: Any = None, teacher_model: Any = None, args: DistillationConfig | None = None, **others: Any
    ):
        own = copy.copy(resolve_args(args, model, DistillationConfig))
        if teacher_model is not None:
            if own.teacher is not None:
                evidence = f"`teacher_model` was given and args.teacher={own.teacher!r}:"
                raise CheckError.of("settings-contradict", evidence, "leave one of them out.")
            is_name = isinstance(teacher_model, str | os.PathLike)
            name = os.fspath(teacher_model) if is_name else source_of(teacher_model) or "teacher_model"
            own.teacher = teacher_source(name)
            report(teachers_on_servers_score_all_tokens(own))
            self.teacher_model = None if is_name else teacher_model
        if own.teacher is None:
            raise CheckError.of(
                "reward-missing",
                "there is no teacher: neither `teacher_model` nor args.teacher names one.",
                "Give a model, hub id, folder or URL, or one of 'start', 'policy' and 'follower' as args.teacher.",
            )
        super().__init__(model=model, args=own, **others)


for kind in (GRPOTrainer, RLOOTrainer, DistillationTrainer):  # `help()` of a class shows its own text alone
    kind.__doc__ = f"{inspect.getdoc(kind)}\n\n{ARGUMENTS}"
