"""Arguments and parts of a run before it trains, with their checks: for the trainer and for `covey explain`.

`read_arguments` needs no model; `build_parts` needs one, which may be without weights.
"""

from dataclasses import dataclass
from typing import Any

from covey.config.base import OnlineConfig
from covey.core.engine import SamplingParams
from covey.rewards import RewardSuite
from covey.rollout.agents import with_agent
from covey.rollout.collector import Collector
from covey.rollout.vision import tokenizer_of
from covey.runtime.user_code import report
from covey.trainer import build
from covey.trainer.build_rollouts import rows_to_train_on
from covey.trainer.checks import check_datasets, check_fit, check_policy
from covey.trainer.evaluation.suites import with_user_messages
from covey.trainer.run import Run
from covey.trainer.teachers import check_columns, check_prompts, check_teachers


@dataclass(frozen=True)
class Arguments:
    """Arguments of a trainer, with what follows from them: rows as messages, the environments of an agent."""

    args: OnlineConfig
    train_dataset: Any
    eval_dataset: Any
    reward_funcs: Any
    tools: Any
    rollout_func: Any
    environment_factory: Any
    seats: Any = None
    eval_seats: Any = None

    @property
    def prompts_required(self) -> bool:
        """No environment gives them."""
        return self.environment_factory is None


@dataclass(frozen=True)
class Parts:
    """Parts of a run that its data have been checked with."""

    collector: Collector
    sampling: SamplingParams
    rewards: RewardSuite


def read_arguments(
    config_class: type[OnlineConfig],
    args: Any,
    model: Any,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Any = None,
    tools: Any = None,
    rollout_func: Any = None,
    environment_factory: Any = None,
    agent: Any = None,
    engine: Any = None,
    seats: Any = None,
    eval_seats: Any = None,
) -> Arguments:
    """Arguments as a run uses them, after the checks of stages `config` and `data` that need no model."""
    args = build.resolve_args(args, model, config_class)
    report(build.check_engine_choice(args, engine))
    environment_factory = with_agent(agent, environment_factory, tools, rollout_func)
    train_dataset = rows_to_train_on(args, train_dataset, environment_factory)
    if args.prompts_as_messages:
        train_dataset, eval_dataset = map(with_user_messages, (train_dataset, eval_dataset))
    judged = None if rollout_func else reward_funcs  # rollouts of the user's own may give further arguments
    found = check_datasets(args, train_dataset, eval_dataset, environment_factory is None, judged)
    report([*found, *check_columns(args, train_dataset, "train_dataset")])
    players = tools, rollout_func, environment_factory, seats, eval_seats
    return Arguments(args, train_dataset, eval_dataset, reward_funcs, *players)


def build_parts(
    run: Run,
    given: Arguments,
    model: Any,
    processing_class: Any,
    engine: Any = None,
    reward_processing_classes: Any = None,
    optimizer: Any = None,
    trainer: Any = None,
) -> Parts:
    """Collector, sampling settings and rewards, after the checks that need the model and its tokenizer.

    `trainer` is for rollout functions that ask for one.
    """
    tokenizer, vision = tokenizer_of(processing_class), build.build_vision(processing_class, model)
    collector = build.build_collector(
        run,
        model,
        tokenizer,
        engine,
        given.tools,
        given.rollout_func,
        given.environment_factory,
        vision,
        given.reward_funcs,
        trainer,
        given.seats,
        given.eval_seats,
    )
    sampling = build.sampling_params(given.args, tokenizer)  # before reward models are loaded
    rewards = build.build_rewards(run, collector, given.reward_funcs, reward_processing_classes)
    teachers = build.sources_of_teachers(given.args, getattr(trainer, "teacher_model", None))
    of_teachers = check_teachers(teachers, model, tokenizer, build.teacher_kwargs(given.args))
    of_model = check_policy(model, optimizer, run.device.type, str(given.args.attn_layout), vision is not None)
    of_data = check_fit(given.args, collector, rewards, given.train_dataset, given.eval_dataset)
    report([*of_model, *of_teachers, *check_prompts(given.args, vision is not None), *of_data])
    return Parts(collector, sampling, rewards)
