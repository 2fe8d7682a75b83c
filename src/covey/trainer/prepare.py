"""Arguments and parts of a run before it trains, with their checks: for the trainer and for `covey explain`.

`read_arguments` needs no model; `build_parts` needs one, which may be without weights.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

from covey.config.base import OnlineConfig
from covey.core.engine import SamplingParams
from covey.core.findings import CheckError
from covey.data.sources import Sources, are_datasets, check_players, check_rows_of_sources, check_sources, read_sources
from covey.rewards import RewardSuite
from covey.rollout.agents import with_agent
from covey.rollout.collector import Collector
from covey.rollout.vision import tokenizer_of
from covey.runtime.user_code import report
from covey.sizing.memory import Opponents
from covey.trainer import build
from covey.trainer.build_rollouts import rows_to_train_on, seats_of_programs
from covey.trainer.checks import check_datasets, check_fit, check_policy, check_routes
from covey.trainer.evaluation.suites import as_of_sources, with_user_messages
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
    by_source: dict[str, OnlineConfig] = field(default_factory=dict)  # configs of sources that compare in their own way

    @property
    def sources(self) -> Sources | None:
        return self.train_dataset if isinstance(self.train_dataset, Sources) else None

    @property
    def opponents(self) -> Opponents:
        """Copies of the policy that seats ask for, those of programs included."""
        given = [seat for seats in (self.seats, self.eval_seats) for seat in (seats or {}).values()]
        factory = self.environment_factory
        of_programs = seats_of_programs(factory.values() if isinstance(factory, dict) else [factory])
        return Opponents.of([*given, *of_programs], self.args.opponents_kept)

    @property
    def prompts_required(self) -> bool:
        """True if rows need a prompt, as no environment gives one."""
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
    sources: Any = None,
) -> Arguments:
    """Arguments as a run uses them, after the checks of stages `config` and `data` that need no model."""
    args = build.resolve_args(args, model, config_class)
    report(build.check_engine_choice(args, engine))
    environment_factory = with_agent(agent, environment_factory, tools, rollout_func)
    train_dataset = rows_to_train_on(args, train_dataset, environment_factory)
    if args.prompts_as_messages:
        train_dataset, eval_dataset = map(with_user_messages, (train_dataset, eval_dataset))
    if are_datasets(train_dataset) or sources is not None:
        train_dataset, eval_dataset = _with_sources(args, train_dataset, eval_dataset, sources, environment_factory)
    judged = None if rollout_func else reward_funcs  # rollouts of the user's own may give further arguments
    found = check_datasets(args, train_dataset, eval_dataset, environment_factory is None, judged)
    report([*found, *check_columns(args, train_dataset, "train_dataset")])
    players = tools, rollout_func, environment_factory, seats, eval_seats
    by_source = _configs_of(args, train_dataset)
    return Arguments(args, train_dataset, eval_dataset, reward_funcs, *players, by_source)


def _with_sources(
    args: OnlineConfig, train_dataset: Any, eval_dataset: Any, given: Any, environment_factory: Any
) -> tuple[Any, Any]:
    """The training data as `Sources`, and evaluation sets that are named after one with its settings."""
    report(check_sources(train_dataset, given, args.max_completion_length))
    found = read_sources(train_dataset, given, args.teacher_column)
    report([*check_players(found, environment_factory, args.teachers), *check_rows_of_sources(found)])
    return found, as_of_sources(found, eval_dataset)


def _configs_of(args: OnlineConfig, train_dataset: Any) -> dict[str, OnlineConfig]:
    """Configs of sources whose completions are compared in their own way; CheckError where one cannot work."""
    found = {}
    for source in train_dataset.sources if isinstance(train_dataset, Sources) else ():
        if changes := source.settings.of_credit:
            try:
                with warnings.catch_warnings(action="ignore"):  # those of the run, again
                    found[source.name] = args.with_changes(**changes)
            except CheckError as error:
                raise error.within(f"sources: {source.name}") from error
    return found


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
    check_routes(given.args, run.policy, vision is not None)  # before the engine, which is slow to start
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
