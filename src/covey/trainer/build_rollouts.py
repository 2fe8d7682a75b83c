"""Rollout specs built from a trainer's arguments, and the consequences of failed rollouts."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.core.records import FinishReason, Mean, Rollout, Stat
from covey.policy.loading import end_token_ids
from covey.rollout.collector import RolloutSpec
from covey.rollout.environments.agent import EnvironmentAgent, TextEnvironmentAgent
from covey.rollout.prompts import PromptCodec
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.parsers import TOOL_PARSERS, parser_for
from covey.rollout.tools.toolbox import Toolbox, call_stats
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import GroupFunction, RolloutError, RolloutFunction, RolloutValidator, form_of
from covey.trainer.build_environments import build_environment
from covey.trainer.context import RunContext

FAILED_BATCHES = 3
"""After this many generations in a row in which every rollout failed, the run stops."""


class RolloutWarning(UserWarning):
    """A rollout failed, and the run goes on."""


def build_rollout_spec(
    context: RunContext, model: Any, codec: PromptCodec, tools: Any, rollout_func: Any, environment_factory: Any
) -> RolloutSpec | None:
    """The spec of rollouts that are more than one completion; None where each is one.

    Args:
        context: of the run; a `rollout_func(prompts, trainer)` gets its trainer.
        model: the policy.
        codec: of the prompts; gets the tools' schemas.
        tools: callables, or None.
        rollout_func, environment_factory: the user's, or None.

    Raises:
        ValueError: arguments that exclude each other, tools without a schema, a chat template that cannot do it.
    """
    args = context.args
    _refuse_combinations(args, tools, rollout_func, environment_factory)
    if not tools and rollout_func is None and environment_factory is None:
        return None
    ends = end_token_ids(model, codec.tokenizer)
    templates = TurnTemplates(codec, sorted(ends), args.unstable_chat_template)
    limits = RolloutValidator(model.get_input_embeddings().num_embeddings, codec.max_context)
    play: Any
    if environment_factory is not None:
        parser = partial(_parser, args, templates)
        play = build_environment(args, environment_factory, _listed(tools or []), limits, parser)
    elif rollout_func is None:
        toolbox = Toolbox(_listed(tools), timeout=args.tool_timeout)
        play = ToolAgent(toolbox, _parser(args, templates, toolbox.schemas), args.max_tool_calling_iterations)
    else:
        form = form_of(rollout_func)
        if form == "batch":
            play = BatchFunction(rollout_func, context.loop, args.rollout_timeout, codec, limits, ends)
        else:
            kind = RolloutFunction if form == "rollout" else GroupFunction
            play = kind(rollout_func, args.rollout_timeout, limits)
    return RolloutSpec(play, templates, args.rollout_timeout, limits)


def _refuse_combinations(args: Any, tools: Any, rollout_func: Any, environment_factory: Any) -> None:
    if rollout_func is not None and environment_factory is not None:
        raise ValueError(
            "`rollout_func` plays the whole rollout, so the environments of `environment_factory` would not be used:"
            " give one of the two. A rollout function makes its environments itself."
        )
    if tools and rollout_func is not None:
        raise ValueError(
            "`rollout_func` plays the whole rollout, so `tools` would not be called: give one of the two. In a rollout"
            " function of the form `async (row, engine)`, a covey.rollout.tools.toolbox.Toolbox calls tools."
        )
    if rollout_func is not None and not callable(rollout_func):
        raise ValueError(
            f"`rollout_func` must be a function, got {type(rollout_func).__name__}: `async def rollout(row, engine)`,"
            " `async def rollouts(row, engine, n)`, or `def rollout(prompts, trainer)`."
        )
    plays = tools or rollout_func is not None or environment_factory is not None
    if plays and args.speculative_reuse is not None:
        raise ValueError(
            f"speculative_reuse={args.speculative_reuse!r} reuses completions that are one turn; with tools, an"
            " environment_factory or a rollout_func, leave it unset."
        )
    if args.max_tool_calling_iterations is not None and not tools and environment_factory is None:
        warnings.warn(
            f"`max_tool_calling_iterations={args.max_tool_calling_iterations}` has no effect without `tools` or an"
            " `environment_factory`.",
            stacklevel=4,
        )


def _listed(tools: Any) -> list[Any]:
    if not isinstance(tools, list | tuple):
        raise ValueError(f"`tools` must be a list of functions, got {type(tools).__name__}. Write tools=[...].")
    return list(tools)


def _parser(args: Any, templates: TurnTemplates, schemas: list[dict[str, Any]]) -> Any:
    """Show these tools in prompts. Returns how calls are read; says so where the chat template leaves that open."""
    templates.codec.tools = schemas
    turns = templates.of(schemas, None)
    template = templates.codec.tokenizer.chat_template
    name = args.tool_parser or parser_for(template)
    if not turns.shows_tools and args.tool_parser is None:
        warnings.warn(
            "the chat template does not tell the model about tools, so the prompts have to: name them, and show how"
            f" a call is written. Calls are read as {name!r}; set `tool_parser` if your prompts teach another"
            " notation.",
            stacklevel=5,
        )
    return TOOL_PARSERS[name]


def plays_functions(spec: RolloutSpec | None) -> bool:
    """True if the user's functions play the rollouts: they may give reward functions any further arguments."""
    return spec is not None and isinstance(spec.play, RolloutFunction | GroupFunction | BatchFunction)


def refuse_plain_prompts(spec: RolloutSpec | None, rows: Sequence[dict[str, Any]], role: str) -> None:
    """Tools and environments need conversations.

    Raises:
        ValueError: a prompt is a string.
    """
    if spec is None or not isinstance(spec.play, ToolAgent | EnvironmentAgent):
        return
    needs = "tools need" if isinstance(spec.play, ToolAgent) else "an environment needs"
    strings = (number for number, row in enumerate(rows) if isinstance(row.get("prompt"), str))
    plain = next(strings, None)
    if plain is not None:
        raise ValueError(
            f"row {plain} of `{role}` has a prompt that is a string, and {needs} conversations. Write it as"
            f' [{{"role": "user", "content": {str(rows[plain]["prompt"])[:40]!r}}}].'
        )


class FailureMonitor:
    """Lets a run go on without failed rollouts, and stops it if all fail.

    Args:
        gather: called with this process's object, returns one such object per process in the order of ranks. None for a
            single process.
    """

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self._gather = gather or (lambda mine: [mine])
        self._has_worked = False
        self._failed_batches = 0
        self._warned = False

    def count(self, rollouts: Sequence[Rollout]) -> int:
        """Count the failed rollouts of this process; all processes decide together, as one may fail by chance.

        Args:
            rollouts: of this process.

        Raises:
            RolloutError: every rollout of every process failed, and none has ever worked or it is not the first such
                generation.
        """
        mine = [rollout.error for rollout in rollouts if rollout.finish is FinishReason.ERROR]
        failed, total, errors = 0, 0, []
        for first_error, failed_there, rollouts_there in self._gather((mine[:1], len(mine), len(rollouts))):
            failed, total = failed + failed_there, total + rollouts_there
            errors += first_error
        first = errors[0] if errors else None
        if failed < total:
            self._has_worked, self._failed_batches = True, 0
        elif total:
            self._failed_batches += 1
            if not self._has_worked or self._failed_batches >= FAILED_BATCHES:
                often = f", {self._failed_batches} generations in a row" if self._has_worked else ""
                raise RolloutError(f"all {total} rollouts failed{often}. The first one: {first}")
        if failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{failed} of {total} rollouts failed; they get no reward and are counted in rollouts/failed. The first"
                f" one: {first}",
                RolloutWarning,
                stacklevel=4,
            )
        return len(mine)


def without_failed(rewards: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """Rewards [n, F] with NaN for rollouts that failed: they say nothing about the policy."""
    failed = torch.tensor([rollout.finish is FinishReason.ERROR for rollout in rollouts], dtype=torch.bool)
    return rewards.masked_fill(failed[:, None], torch.nan) if len(rollouts) else rewards


def failure_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """`rollouts/failed`."""
    return {"rollouts/failed": Mean.of([float(rollout.finish is FinishReason.ERROR) for rollout in rollouts])}


def agent_stats(rollouts: Sequence[Rollout], spec: RolloutSpec) -> dict[str, Stat]:
    """`rollouts/turns`, `rollouts/failed`, ... and, where there are tools, what became of calls and what they took."""
    own = plays_functions(spec) or isinstance(spec.play, TextEnvironmentAgent)
    tools = not own or any(rollout.calls for rollout in rollouts)
    seconds: dict[str, Stat] = {"tools/seconds": Mean.of([rollout.tool_seconds for rollout in rollouts])}
    return {
        "rollouts/turns": Mean.of([float(rollout.num_turns) for rollout in rollouts]),
        "rollouts/seconds": Mean.of([rollout.seconds for rollout in rollouts if rollout.seconds]),
        **failure_stats(rollouts),
        "rollouts/tool_budget": Mean.of([float(rollout.finish is FinishReason.TOOL_BUDGET) for rollout in rollouts]),
        **(call_stats(rollouts) | seconds if tools else {}),
    }
