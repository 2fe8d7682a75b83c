"""Rollout functions of the user's own that play one rollout, or a group of siblings, kept from harming the run.

- `async def rollout(row, engine) -> Rollout` plays one rollout (`RolloutFunction`).
- `async def rollouts(row, engine, n) -> list[Rollout]` plays the n completions of a prompt together (`GroupFunction`):
  branches of one tree, players of one game.

Both run on an event loop apart, so that one that blocks delays nothing but others of its kind, and under a deadline.
What they return is checked: tokens outside of the vocabulary would otherwise end the run far from their cause. Not
here: functions that play all of a generation at once (`batch_function`).
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from covey.core.rollout import Completion, Rollout
from covey.rollout.engine import SampleRequest
from covey.rollout.episode import Ask, EpisodeEngine
from covey.rollout.tools.execution import CoroutineLoop, Handovers, is_async

T = TypeVar("T")


class RolloutError(ValueError):
    """Rollouts cannot be had from what the user gave: a function, an environment or tools."""


@dataclass(frozen=True)
class Limits:
    """What the tokens of a rollout must keep to.

    Attributes:
        vocabulary: number of tokens that the model knows.
        context: most tokens of prompt and completion together; None when unlimited.
    """

    vocabulary: int
    context: int | None

    def check(self, rollout: Rollout) -> None:
        """Look at a rollout that the user's code put together.

        Raises:
            RolloutError: it cannot be trained on.
        """
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        wrong = next((one for one in ids if type(one) is not int or not 0 <= one < self.vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"token {wrong!r} of a rollout is no token of the model, which has {self.vocabulary}.")
        if not rollout.prompt_ids:
            raise RolloutError("a rollout has an empty prompt; its prompt_ids need one token at least.")
        if self.context is not None and len(ids) > self.context:
            raise RolloutError(f"a rollout of {len(ids)} tokens exceeds the model's context of {self.context}.")
        reported = [rollout.logprobs, rollout.entropies, rollout.versions]
        if any(len(one) != len(rollout.completion_ids) for one in (rollout.sampled, *reported) if one is not None):
            raise RolloutError("a rollout's sampled, logprobs, entropies and versions need one value a token.")
        if any(not math.isfinite(one) for one in rollout.logprobs or ()):
            raise RolloutError("a rollout has log-probs that are not finite; leave `logprobs` None if there are none.")


class _Apart:
    """Runs coroutines of the user's on an event loop apart.

    Args:
        function: the user's.
        timeout: seconds that one call may take.
        limits: of the tokens of what it returns.
    """

    def __init__(self, function: Callable[..., Awaitable[Any]], timeout: float, limits: Limits):
        self._function = function
        self._timeout = timeout
        self._limits = limits
        self._loop = CoroutineLoop()
        self._handovers = Handovers()

    async def _returned(self, engine: EpisodeEngine, *arguments: Any) -> Any:
        """What the function returns.

        Raises:
            TimedOut, Raised: as `CoroutineLoop.run`.
        """
        engine.ask_through(partial(self._across, asyncio.get_running_loop()))
        return await self._loop.run(lambda: self._function(*arguments), self._timeout)

    def _across(self, home: asyncio.AbstractEventLoop, ask: Ask) -> Ask:
        """The engine for code on another loop. What is asked there in one turn is asked here in one turn too."""

        async def from_there(request: SampleRequest) -> list[Completion]:
            answer: Future[list[Completion]] = Future()
            self._handovers.to(home).give(lambda: _answer(ask(request), answer))
            return await asyncio.wrap_future(answer)

        return from_there


class RolloutFunction(_Apart):
    """A user's `async (row, engine) -> Rollout` as an agent."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one rollout.

        Raises:
            TimedOut, Raised: it took too long, or raised.
            RolloutError: what it returned is no rollout that can be trained on.
        """
        rollout = await self._returned(engine, row, engine)
        if not isinstance(rollout, Rollout):
            raise RolloutError(
                f"the rollout function returned {type(rollout).__name__}; it must return a Rollout, such as"
                " `episode.done()` gives."
            )
        self._limits.check(rollout)
        return rollout


class GroupFunction(_Apart):
    """A user's `async (row, engine, n) -> n rollouts`."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """Play n completions of a prompt.

        Raises:
            TimedOut, Raised: it took too long, or raised.
            RolloutError: what it returned are not n rollouts that can be trained on.
        """
        returned = await self._returned(engine, row, engine, n)
        rollouts = list(returned) if isinstance(returned, list | tuple) else []
        if len(rollouts) != n or not all(isinstance(rollout, Rollout) for rollout in rollouts):
            kinds = sorted({type(rollout).__name__ for rollout in rollouts})
            got = f"{len(rollouts)} of {', '.join(kinds)}" if rollouts else repr(returned)[:60]
            raise RolloutError(
                f"the rollout function was asked for {n} rollouts of a prompt and returned {got}; it must return a list"
                f" of {n} Rollouts, such as `episode.done()` gives."
            )
        for rollout in rollouts:
            self._limits.check(rollout)
        return [copy.copy(rollout) for rollout in rollouts]  # one that is returned twice counts twice


def _answer(work: Coroutine[Any, Any, T], answer: "Future[T]") -> None:
    """Run a coroutine on the loop that is running; what becomes of it becomes of `answer`, and the other way round."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def settle(task: "asyncio.Task[T]") -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            if task.cancelled():
                answer.cancel()
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

    def given_up(answer: "Future[T]") -> None:
        if answer.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(settle)
    answer.add_done_callback(given_up)


def form_of(function: Callable[..., Any]) -> str:
    """What a `rollout_func` plays: "rollout", "group" or, if it is no coroutine function, "batch".

    Raises:
        ValueError: it takes other arguments than any of the forms.
    """
    if not is_async(function):
        return "batch"
    taken = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in taken):
        return "rollout"
    needed = [one.name for one in taken if one.kind in POSITIONAL and one.default is one.empty]
    if len(needed) not in (2, 3) or needed[0] == "prompts":
        raise ValueError(
            f"`rollout_func` is an async function of ({', '.join(needed)}), which is none of the forms: `async def"
            " rollout(row, engine)`, `async def rollouts(row, engine, n)`, or, without async, `def rollout(prompts,"
            " trainer)`."
        )
    return "rollout" if len(needed) == 2 else "group"


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
