"""Rollout specs from a trainer's arguments: tools, rollout functions and environments."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from covey.algorithms.comparison import ROLE_AVERAGE
from covey.config.base import OnlineConfig
from covey.config.messages import ignored
from covey.core.findings import CheckError, Finding
from covey.data.sources import Source, Sources
from covey.policy.loading import end_token_ids
from covey.rewards import TurnEnd
from covey.rewards.suite import Routes, as_weights
from covey.rollout.collector import run_async
from covey.rollout.environments import agent
from covey.rollout.environments.game import METHODS, PlayedGame, is_game
from covey.rollout.environments.interface import EnvironmentFailed, required, tool_methods
from covey.rollout.environments.pool import EnvironmentPool
from covey.rollout.images import has_images
from covey.rollout.prompts import PromptCodec, row_images, row_tools
from covey.rollout.runner import RolloutSpec
from covey.rollout.seats import checked_seats, past_steps
from covey.rollout.table import Table, TableSeat
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.parsers import TOOL_PARSERS, ToolParser, parser_for
from covey.rollout.tools.toolbox import Toolbox
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import GroupFunction, RolloutFunction, RolloutValidator, form_of
from covey.runtime.calling_thread import CallingThread
from covey.runtime.user_code import report
from covey.trainer.integrations.attributes import as_list

OWN_ROWS = 1000  # of each environment, where there is no training data


def build_rollout_spec(
    args: OnlineConfig,
    model: Any,
    codec: PromptCodec,
    tools: Any,
    rollout_func: Any,
    environment_factory: Any,
    trainer: Any,
    seats: Any = None,
    eval_seats: Any = None,
) -> RolloutSpec | None:
    """The spec of rollouts that are more than one completion; None where each is one. `codec` gets tools' schemas."""
    report(_check_combinations(args, tools, rollout_func, environment_factory))
    report(_check_seats(args, rollout_func, environment_factory, seats, eval_seats))
    if not tools and rollout_func is None and environment_factory is None:
        return None
    tools = list(tools or [])
    ends = end_token_ids(model, codec.tokenizer)
    templates = TurnTemplates(codec, sorted(ends), args.unstable_chat_template, args.tool_parser)
    limits = RolloutValidator(model.get_input_embeddings().num_embeddings, codec.max_context)
    play: Any
    if is_game(environment_factory):
        play = PlayedGame(environment_factory, args.rollout_timeout, limits)
        report(_check_game(args, play, tools, {**(seats or {})}, {**(seats or {}), **(eval_seats or {})}))
    elif environment_factory is not None:
        if is_team(environment_factory):
            report(_check_team(environment_factory, seats, eval_seats))
        build = partial(build_environment, args, tools=tools, limits=limits, parser=partial(_parser, args, templates))
        named = isinstance(environment_factory, dict)
        play = build_environments(environment_factory, build) if named else build(environment_factory)
        codec.tools = () if named else codec.tools  # each environment shows its own
    elif rollout_func is None:
        toolbox = Toolbox(tools, timeout=args.tool_timeout)
        play = ToolAgent(toolbox, _parser(args, templates, toolbox.schemas), args.max_tool_calling_iterations)
    elif (form := form_of(rollout_func)) == "batch":
        play = BatchFunction(rollout_func, trainer, args.rollout_timeout, codec, limits, ends)
    else:
        kind = RolloutFunction if form == "rollout" else GroupFunction
        declared = rollout_func.own if isinstance(rollout_func, TableSeat) else ()
        play = kind(rollout_func, args.rollout_timeout, limits, declared)
    return RolloutSpec(
        play,
        templates,
        args.rollout_timeout,
        limits,
        args.max_turn_length,
        args.trained_turns,
        args.rollouts_per_game,
        checked_seats(seats, args.rollout_timeout),
        checked_seats(eval_seats, args.rollout_timeout),
    )


def _check_combinations(
    args: OnlineConfig, tools: Any, rollout_func: Any, environment_factory: Any
) -> Iterator[Finding]:
    """Findings about what plays the rollouts: their kinds, which of them exclude each other, and unread settings."""
    if rollout_func is not None and environment_factory is not None:
        yield Finding.error(
            "players-several",
            "`rollout_func` plays the whole rollout, so the environments of `environment_factory` would not be used:",
            "give one of the two. A rollout function makes its environments itself.",
        )
    if tools and rollout_func is not None:
        yield Finding.error(
            "players-several",
            "`rollout_func` plays the whole rollout, so `tools` would not be called:",
            "give one of the two. In a rollout function of the form `async (row, engine)`, a"
            " covey.rollout.tools.toolbox.Toolbox calls tools.",
        )
    if tools and not isinstance(tools, list | tuple):
        evidence = f"`tools` must be a list of functions, got {type(tools).__name__}."
        yield Finding.error("player-type", evidence, "Write tools=[...].")
    if rollout_func is not None and not callable(rollout_func):
        yield Finding.error(
            "player-type",
            f"`rollout_func` must be a function, got {type(rollout_func).__name__}:",
            "`async def rollout(row, engine)`, `async def rollouts(row, engine, n)`, or `def rollout(prompts,"
            " trainer)`.",
        )
        return
    if isinstance(rollout_func, Table) or isinstance(environment_factory, Table):
        yield Finding.error(
            "player-type",
            "a Table is played by variants of a study, and this trainer has one policy.",
            "Give it to covey.study.Study in `parts`, or the game itself to the trainer, which then plays all seats.",
        )
        return
    plays = tools or rollout_func is not None or environment_factory is not None
    if plays and args.speculative_reuse is not None:
        yield Finding.error(
            "draft-reuse",
            f"speculative_reuse={args.speculative_reuse!r} reuses completions that are one turn; with tools, an"
            " environment_factory or a rollout_func, leave it unset.",
        )
    if args.replay_from is not None:
        return  # rollouts are on record, whatever played them
    if not plays or (rollout_func is not None and form_of(rollout_func) == "batch"):
        for name, default in (("max_turn_length", None), ("trained_turns", "all")):
            if (value := getattr(args, name)) != default:
                evidence = f"`{name}={value!r}` has no effect on rollouts that are one completion."
                yield Finding.warning("setting-unread", evidence)
        yield from ignored(args, ["supervised_roles"], "no writer but the policy is known in such rollouts")
    if not plays and args.compare != "group":
        yield Finding.error(
            "roles-missing",
            f"compare={args.compare!r}, but rollouts that are one completion of a prompt have no roles.",
            "Play games with `rollout_func` or `environment_factory`, or leave compare at 'group'.",
        )
    if not plays:
        names = ["tool_timeout", "rollout_timeout", "tool_parser", "unstable_chat_template"]
        yield from ignored(args, names, "there are no tools, no environments and no rollout function")
    if args.max_tool_calling_iterations is not None and not tools and environment_factory is None:
        yield Finding.warning(
            "setting-unread",
            f"`max_tool_calling_iterations={args.max_tool_calling_iterations}` has no effect without `tools` or an"
            " `environment_factory`.",
        )


def _check_seats(
    args: OnlineConfig, rollout_func: Any, environment_factory: Any, seats: Any, eval_seats: Any
) -> Iterator[Finding]:
    """Warnings about seats, and settings of games, that nothing plays with."""
    programs = environment_factory.values() if isinstance(environment_factory, dict) else [environment_factory]
    by_name = any(hasattr(one, "seats") or is_game(one) or is_team(one) for one in programs)
    by_name = by_name or (rollout_func is not None and form_of(rollout_func) != "batch")
    for name, given in (("seats", seats), ("eval_seats", eval_seats)):
        if given and not by_name:
            evidence = f"`{name}={given!r}` has no effect:"
            fix = (
                "only rollout functions of the forms (row, engine) and (row, engine, n), games and programs have seats."
            )
            yield Finding.warning("setting-unread", evidence, fix)
    if args.replay_from is None and not (
        is_game(environment_factory)
        or is_team(environment_factory)
        or (rollout_func is not None and form_of(rollout_func) == "group")
    ):
        because = "no function of the form (row, engine, n) plays several rollouts of a game"
        yield from ignored(args, ["rollouts_per_game"], because)
    past = [one for one in (*(seats or {}).values(), *(seats_of_programs(programs))) if past_steps(one) is not None]
    if not past and args.replay_from is None:
        yield from ignored(args, ["opponents_kept"], 'no seat is an earlier policy ("policy:n")')


def _check_game(args: OnlineConfig, play: PlayedGame, tools: Any, seats: Any, eval_seats: Any) -> Iterator[Finding]:
    """Errors of a game's methods and seats."""
    name, roles = play.sources[0].name, ", ".join(play.roles)
    yield from _check_tools(tools or (), name)
    kind = play.factory if isinstance(play.factory, type) else type(play.factory())
    if missing := [method for method in METHODS if not callable(getattr(kind, method, None))]:
        evidence = f"`environment_factory` {name} has roles and no method {', '.join(missing)}:"
        yield Finding.error("environment-methods", evidence, f"a game has {', '.join(METHODS)}.")
    if len(set(play.roles)) < len(play.roles):
        evidence = f"{name} has a role twice: its roles are {roles}."
        yield Finding.error("game-seats", evidence, "Give each seat a role of its own.")
        return
    if unknown := [role for role in eval_seats if role not in play.roles]:
        evidence = f"the seats {', '.join(map(repr, unknown))} are no roles of {name}, which are {roles}."
        yield Finding.error("game-seats", evidence, "Name the role that an opponent plays.")
        return
    if isinstance(play.factory, TableSeat):
        players = play.factory.table.players
        if empty := [role for role in play.roles if role not in players and role not in seats]:
            evidence = f"the role {empty[0]!r} of {name} is played by no variant of the table and has no seat."
            yield Finding.error("game-seats", evidence, "Name a variant for it, or give `seats` an opponent.")
    trained, evaluated = len(play.trained(seats)), len(play.trained(eval_seats))
    if trained != args.rollouts_per_game:
        yield Finding.error(
            "game-seats",
            f"{name} has {trained} seats that are trained ({', '.join(play.trained(seats))}), and"
            f" rollouts_per_game={args.rollouts_per_game}.",
            f"Set rollouts_per_game={trained}." if trained else "Leave a seat to the policy.",
        )
    elif not evaluated or args.rollouts_per_game % evaluated:
        yield Finding.error(
            "game-seats",
            f"with eval_seats {evaluated} seats of {name} are the policy's, and an evaluation plays"
            f" {args.rollouts_per_game} rollouts at a time (rollouts_per_game).",
            f"Leave a number of seats to the policy that divides {args.rollouts_per_game}.",
        )


def is_team(environment: Any) -> bool:
    """True for an environment of several agents that plays its episodes itself."""
    return callable(getattr(environment, "play_team", None)) and len(getattr(environment, "roles", ())) > 1


def _check_team(environment: Any, seats: Any, eval_seats: Any) -> Iterator[Finding]:
    """Errors of opponents of an environment of several agents."""
    roles = environment.roles
    if unknown := [role for role in (*(seats or {}), *(eval_seats or {})) if role not in roles]:
        evidence = f"the seat {unknown[0]!r} is no agent of the environment, which has {', '.join(roles)}."
        yield Finding.error("game-seats", evidence, "Name the agent that an opponent plays.")
    if all(role in (seats or {}) for role in roles):
        evidence = f"opponents play all agents of the environment ({', '.join(roles)})."
        yield Finding.error("game-seats", evidence, "Leave one to the policy.")


def seats_of_programs(programs: Iterable[Any]) -> list[Any]:
    return [seat for one in programs for seat in getattr(one, "seats", {}).values()]


def _parser(args: OnlineConfig, templates: TurnTemplates, schemas: list[dict[str, Any]]) -> ToolParser:
    """Show these tools in prompts. Returns how calls are read; warns where the chat template leaves that open."""
    templates.codec.tools = schemas
    turns = templates.of(schemas, None)
    name = args.tool_parser or parser_for(templates.codec.tokenizer.chat_template)
    if not turns.shows_tools and args.tool_parser is None:
        untold = Finding.warning(
            "template-tools",
            "the chat template does not tell the model about tools, so the prompts have to: name them, and show how a"
            " call is written.",
            f"Calls are read as {name!r}; set `tool_parser` if your prompts teach another notation.",
        )
        report([untold])
    return TOOL_PARSERS[name]


def plays_functions(spec: RolloutSpec | None) -> bool:
    """True if the user's functions play the rollouts: they may give reward functions any further arguments."""
    return (
        spec is not None
        and isinstance(spec.play, RolloutFunction | GroupFunction | BatchFunction)
        and not isinstance(spec.play, PlayedGame)
    )


def check_rows(spec: RolloutSpec | None, rows: Sequence[dict[str, Any]], role: str) -> Iterator[Finding]:
    """Errors of strings where conversations are needed, of images for programs, and of unknown environments."""
    play: Any = spec and spec.play
    for number, row in enumerate(rows):
        player = play
        if isinstance(play, agent.NamedEnvironments):
            try:
                player = play.agents[play.checked_name(row)]
            except EnvironmentFailed as unknown:
                yield Finding.error("environment-name", f"row {number} of `{role}`: {unknown}.")
                return
        if getattr(player, "text_only", False) and (row_images(row) or has_images(row.get("prompt"))):
            yield Finding.error(
                "prompt-images",
                f"row {number} of `{role}` has images, and `agent` is a program that gets its row as JSON and asks the"
                " policy in text.",
                "Play the rollouts with `rollout_func`, or remove the images, as by `dataset.remove_columns('image')`.",
            )
        if row_tools(row) and (shown := _schemas(player)):
            yield Finding.error(
                "column-tools",
                f"row {number} of `{role}` has schemas in its column `tools`, and this run calls tools of its own"
                f" ({', '.join(one['function']['name'] for one in shown)}): a prompt would show one and the policy call"
                " the other.",
                "Remove the column, as by `dataset.remove_columns('tools')`, or leave the run's tools out.",
            )
        in_messages = isinstance(player, ToolAgent | agent.EnvironmentAgent | PlayedGame)
        if in_messages and isinstance(prompt := row.get("prompt"), str):
            needs = "tools need" if isinstance(player, ToolAgent) else "an environment needs"
            yield Finding.error(
                "prompt-messages",
                f"row {number} of `{role}` has a prompt that is a string, and {needs} conversations.",
                f'Write it as [{{"role": "user", "content": {prompt[:40]!r}}}].',
            )


def _schemas(player: Any) -> Sequence[dict[str, Any]]:
    return player.toolbox.schemas if isinstance(player, ToolAgent) else getattr(player, "schemas", ())


def build_environments(factories: dict[str, Any], build: Callable[[Any], Any]) -> agent.NamedEnvironments:
    if games := [name for name, one in factories.items() if is_game(one) or len(getattr(one, "roles", ())) > 1]:
        evidence = f"`environment_factory` names the game {games[0]!r} among others, and games are played alone:"
        raise CheckError.of("player-type", evidence, "give it as environment_factory itself.")
    if not factories or not all(isinstance(name, str) for name in factories):
        raise CheckError.of(
            "player-type",
            f"`environment_factory` has the keys {list(factories)!r}; a dictionary gives each factory a name, as in"
            ' {"shop": Shop}, that rows have in their column `environment`.',
        )
    return agent.NamedEnvironments({name: build(factory) for name, factory in factories.items()})


def build_environment(
    args: OnlineConfig, factory: Any, tools: Sequence[Any], limits: RolloutValidator, parser: Callable[..., ToolParser]
) -> agent.EnvironmentAgent | agent.PlayedEnvironment | agent.PlayedTeam:
    """The agent for the environments that a factory makes, or for an object that plays rollouts itself."""
    if not isinstance(factory, type) and inspect.iscoroutinefunction(getattr(factory, "play", None)):
        report(_check_tools(tools, type(factory).__name__))
        together = is_team(factory) and args.rollouts_per_game > 1
        played = agent.PlayedTeam if together else agent.PlayedEnvironment
        return played(factory, args.rollout_timeout, limits)
    if not callable(factory) or isinstance(factory, str):
        raise CheckError.of(
            "player-type",
            f"`environment_factory` must be a class or a function that makes an environment, got an object of the type"
            f" {type(factory).__name__}.",
            "Every rollout needs an environment of its own.",
        )
    pool = EnvironmentPool(factory, args.tool_timeout, getattr(factory, "max_environments", None))
    # Ahead of training, rollouts are sampled while the main thread trains.
    run = run_async if args.max_staleness else CallingThread("covey-sampling").run
    try:
        lease = run(pool.acquire())  # an environment to look at; the first rollout gets it
    except EnvironmentFailed as failed:
        fix = "It is called without arguments and must return a new environment."
        raise CheckError.of("environment-fails", f"{failed}.", fix) from failed
    example = lease.environment
    pool.release(example)
    kind, source = type(example).__name__, agent.RewardSource.of(example)
    report(_check_names(type(example), factory))
    if not callable(getattr(example, "reset", None)):
        evidence = f"`environment_factory` made a {kind}, which has no method `reset(**row)`."
        raise CheckError.of("environment-methods", evidence)
    if callable(getattr(example, "step", None)):
        report(_check_tools(tools, kind))
        max_turns = _setting(factory, example, "max_turns", args.max_tool_calling_iterations)
        if _setting(factory, example, "max_turns", None) is not None:
            report(ignored(args, ["max_tool_calling_iterations"], f"{kind} has max_turns={max_turns}, which decides"))
        turn_end = TurnEnd if _setting(factory, example, "turn_rewards", False) else None
        return agent.TextEnvironmentAgent(pool, True, required(example.reset), source, max_turns, turn_end)
    gives_reward = callable(getattr(example, "get_reward", None))
    methods = tool_methods(example)
    if not methods and not tools:
        return agent.EnvironmentAgent(pool, gives_reward, required(example.reset), source)
    toolbox = Toolbox([*methods, *tools], timeout=args.tool_timeout)
    player = ToolAgent(toolbox, parser(toolbox.schemas), args.max_tool_calling_iterations)
    names = list(toolbox.tools)[: len(methods)]
    return agent.ToolEnvironmentAgent(pool, gives_reward, required(example.reset), source, agent=player, methods=names)


class EnvironmentReward:
    """The reward that environments of one class gave their rollouts, as a reward function named after the class.

    The scores of all of them become metrics in the call of the first.
    """

    def __init__(self, name: str, number: int):
        self.__name__, self.number = name, number

    def __call__(self, **columns: Any) -> list[Any]:
        for scores in (columns.get(agent.SCORES) or ()) if self.number == 0 else ():
            for name, value in (scores or {}).items():
                columns["log_metric"](f"environment/{name}", value)
        rewards = columns.get(agent.REWARD) or [None] * len(columns["completions"])
        numbers = columns.get(agent.REWARD_NUMBER) or [0] * len(rewards)
        return [reward if number == self.number else None for reward, number in zip(rewards, numbers, strict=True)]


@dataclass(frozen=True)
class RewardPlan:
    """Arguments of a `RewardSuite`."""

    functions: Any  # None: there are none
    weights: Any
    processing_classes: Any
    routes: Routes | None = None


def reward_plan(
    functions: Any, weights: Any, processing_classes: Any, player: Any, sources: Sources | None = None
) -> RewardPlan:
    """The run's functions, then functions that only its sources name, then the environments' own where they have any.

    Functions without a given weight have weight 1.
    """
    every, added = as_list(functions), list[Any]()
    own = {one.name: as_list(one.settings.reward_funcs) for one in (sources.sources if sources else ())}
    for function in chain.from_iterable(own.values()):
        if not any(function is known for known in (*every, *added)):
            added.append(function)
    if getattr(player, "gives_reward", False) and not (functions and getattr(player, "optional_reward", False)):
        added += [EnvironmentReward(source.name, number) for number, source in enumerate(player.sources)]
    if not added:
        routes = None if sources is None or not every else _routes(every, sources, len(every))
        return RewardPlan(functions if every else None, weights, processing_classes, routes)
    if weights is not None and len(weights) == len(every):
        weights = [*weights, *(1.0 for _ in added)]
    if processing_classes is not None:
        processing_classes = [*as_list(processing_classes), *(None for _ in added)]
    both = [*every, *added]
    routes = None if sources is None else _routes(both, sources, len(every))
    return RewardPlan(both, weights, processing_classes, routes)


def _routes(functions: list[Any], sources: Sources, of_run: int) -> Routes:
    """Functions by source: the first `of_run`, the run's, score rows of sources without functions of their own."""
    scored_by: list[set[str] | None] = [
        None if isinstance(one, EnvironmentReward) else {""} if number < of_run else set()
        for number, one in enumerate(functions)
    ]
    weights = {}
    for source in sources.sources:
        settings = source.settings
        usual = list(range(of_run))
        if settings.reward_funcs is not None:
            given = as_list(settings.reward_funcs)
            usual = [next(place for place, one in enumerate(functions) if one is function) for function in given]
        for place in usual:
            if (names := scored_by[place]) is not None:
                names.add(source.name)
        if settings.reward_weights is not None:
            own = dict(zip(usual, as_weights(settings.reward_weights, len(usual)).tolist(), strict=True))
            weights[source.name] = [own.get(place, 1.0) for place in range(len(functions))]
        elif settings.reward_funcs is not None:
            weights[source.name] = [1.0] * len(functions)
    return Routes([None if names is None else frozenset(names) for names in scored_by], weights)


def check_reward_sources(plan: RewardPlan, sources: Sources | None, args: OnlineConfig) -> Iterator[Finding]:
    """Errors of sources whose rows nothing rewards and no teacher scores, or whose rewards are compared with none."""
    routes = plan.routes
    if sources is None or routes is None:
        return
    for source in sources.sources:
        name = source.name
        rewarded = any(routes.accepts(number, {"source": name}) for number in range(len(routes.scored_by)))
        if not rewarded and not is_taught(source, args):
            yield Finding.error(
                "source-reward",
                f"source {name!r} has no reward function and no teacher, and its environment gives no reward.",
                f"Give it some, as in sources={{{name!r}: {{'reward_funcs': ...}}}}, or the run `reward_funcs`.",
            )
        settings = source.settings
        if rewarded and settings.num_generations == 1 and (settings.compare or args.compare) != ROLE_AVERAGE:
            yield Finding.error(
                "group-of-one",
                f"sources: {name}: num_generations=1 with rewards: a completion is compared with the others of its"
                " prompt, so every advantage would be 0.",
                "Set 2 or more, or leave its rewards out to learn from a teacher alone.",
            )


def is_taught(source: Source, args: OnlineConfig) -> bool:
    """True if rows of a source have a teacher: the run's only one, the source's, or by a column."""
    if not isinstance(args.teacher, dict):
        return args.teacher is not None
    return len(source.rows) > 0 and bool(source.row(0).get(args.teacher_column))


def rows_to_train_on(args: OnlineConfig, train_dataset: Any, factory: Any) -> Any:
    """The given dataset; without one, with `max_steps`, the environments' tasks, or rows with a seed each."""
    if train_dataset is not None or factory is None or args.max_steps <= 0:
        return train_dataset

    def rows(factory: Any, **name: str) -> list[dict[str, Any]]:
        if isinstance(factory, type) or not hasattr(factory, "dataset"):
            return [{"prompt": None, "seed": seed, **name} for seed in range(OWN_ROWS)]
        tasks = factory.dataset(OWN_ROWS)  # fewer, if there are no more
        return [tasks[number % len(tasks)] | name for number in range(OWN_ROWS)]

    if not isinstance(factory, dict):
        return rows(factory)
    return list(chain.from_iterable(zip(*(rows(one, environment=name) for name, one in factory.items()), strict=True)))


OPTIONAL = ("get_reward", "close", "max_turns", "turn_rewards", "max_environments", "dataset", "reward_name")
"""Methods and attributes that an environment's class or its factory may have."""


def _check_names(kind: type, factory: Any) -> Iterator[Finding]:
    """Warnings of names in an environment's class that resemble an optional one (`OPTIONAL`) and are not read."""
    known = {name for name in OPTIONAL if hasattr(kind, name) or hasattr(factory, name)}
    for name in vars(kind):
        missing = difflib.get_close_matches(name, [one for one in OPTIONAL if one not in known], n=1, cutoff=0.85)
        if missing and name not in known and not name.startswith("_"):
            evidence = f"{kind.__name__}.{name} is not read as {missing[0]!r}, which an environment may have:"
            yield Finding.warning("environment-methods", evidence, "rename it.")


def _setting(factory: Any, example: Any, name: str, otherwise: Any) -> Any:
    values = (getattr(source, name, None) for source in (factory, example))
    return next((value for value in values if value is not None), otherwise)


def _check_tools(tools: Sequence[Any], kind: str) -> Iterator[Finding]:
    if tools:
        yield Finding.error(
            "players-several",
            f"`tools` would not be called: a {kind} receives the text of the policy as it is.",
            "Leave `tools` out, or give the environment methods for the policy to call instead of `step`.",
        )
