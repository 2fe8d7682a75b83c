"""Rollout functions of the user's own that play one rollout, or a group of siblings, kept from harming the run.

- `async def rollout(row, engine) -> Rollout` plays one rollout (`RolloutFunction`).
- `async def rollouts(row, engine, n) -> list[Rollout]` plays the n completions of a prompt together (`GroupFunction`):
  branches of one tree, players of one game.

Both run on an event loop apart, so that one that blocks delays nothing but others of its kind, and under a deadline.
What they return is checked: tokens outside of the vocabulary would otherwise end the run far from their cause. Not
here: functions that play all of a generation at once (`batch_function`).
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from covey.core.engine import SampleRequest
from covey.core.rollout import Completion, Rollout
from covey.rollout.episode import EpisodeEngine, Generate
from covey.rollout.validation import RolloutError as RolloutError
from covey.rollout.validation import RolloutValidator as RolloutValidator
from covey.runtime.loop_thread import CallbackRelay, LoopThread
from covey.runtime.user_code import UserCodeError, is_async

T = TypeVar("T")


class _Apart:
    """Runs coroutines of the user's on an event loop apart.

    Args:
        function: the user's.
        timeout: seconds that one call may take.
        limits: of the tokens of what it returns.
    """

    def __init__(self, function: Callable[..., Awaitable[Any]], timeout: float, limits: RolloutValidator):
        self._function = function
        self._timeout = timeout
        self._limits = limits
        self._loop = LoopThread("covey-async-tools")
        self._relay = CallbackRelay()

    async def _read(self, engine: EpisodeEngine, read: Callable[[Any], T], *arguments: Any) -> T:
        """What `read` makes of what the function returns; there too, for that may hang or change as long as it likes.

        Raises:
            CallTimeout, UserCodeError: as `LoopThread.call`.
            RolloutError: what `read` says of it.
        """
        engine.wrap_generate(partial(self._across, asyncio.get_running_loop()))

        async def play() -> T:
            return read(await self._function(*arguments))

        try:
            return await self._loop.call(play, self._timeout)
        except UserCodeError as raised:
            if isinstance(raised.error, RolloutError):
                raise raised.error from None
            raise

    def _across(self, home: asyncio.AbstractEventLoop, generate: Generate) -> Generate:
        """The engine for code on another loop. What is asked there in one turn is asked here in one turn too."""

        async def from_there(request: SampleRequest) -> list[Completion]:
            answer: Future[list[Completion]] = Future()
            self._relay.send(home, lambda: _answer(generate(request), answer))
            return await asyncio.wrap_future(answer)

        return from_there


class RolloutFunction(_Apart):
    """A user's `async (row, engine) -> Rollout` as an agent."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one rollout.

        Raises:
            CallTimeout, UserCodeError: it took too long, or raised.
            RolloutError: what it returned is no rollout that can be trained on.
        """
        return await self._read(engine, self._one, row, engine)

    def _one(self, returned: Any) -> Rollout:
        if not isinstance(returned, Rollout):
            raise RolloutError(
                f"the rollout function returned {type(returned).__name__}; it must return a Rollout, such as"
                " `episode.done()` gives."
            )
        return self._limits.checked(returned)


class GroupFunction(_Apart):
    """A user's `async (row, engine, n) -> n rollouts`."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """Play n completions of a prompt.

        Raises:
            CallTimeout, UserCodeError: it took too long, or raised.
            RolloutError: what it returned are not n rollouts that can be trained on.
        """
        return await self._read(engine, partial(self._several, n), row, engine, n)

    def _several(self, n: int, returned: Any) -> list[Rollout]:
        rollouts = list(returned) if isinstance(returned, list | tuple) else []
        if len(rollouts) != n or not all(isinstance(rollout, Rollout) for rollout in rollouts):
            kinds = sorted({type(rollout).__name__ for rollout in rollouts})
            got = f"{len(rollouts)} of {', '.join(kinds)}" if rollouts else repr(returned)[:60]
            raise RolloutError(
                f"the rollout function was asked for {n} rollouts of a prompt and returned {got}; it must return a list"
                f" of {n} Rollouts, such as `episode.done()` gives."
            )
        return [self._limits.checked(rollout) for rollout in rollouts]  # copies: one that is returned twice is two


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
    try:
        taken = inspect.signature(function).parameters.values()
    except ValueError:  # compiled code that does not say
        return "batch"
    if not is_async(function):
        needed = [one.name for one in taken if one.kind in POSITIONAL and one.default is one.empty]
        if "engine" in needed:
            raise ValueError(
                f"`rollout_func` is a function of ({', '.join(needed)}) that is not async, and an engine is waited for:"
                " write `async def` and `await episode.sample()`."
            )
        takes = sum(one.kind in POSITIONAL for one in taken)
        if len(needed) > 2 or (takes < 2 and not any(one.kind is one.VAR_POSITIONAL for one in taken)):
            raise ValueError(
                f"`rollout_func` is a function of ({', '.join(needed)}), but is called with (prompts, trainer): the"
                " config is `trainer.args`, the tokenizer `trainer.processing_class`."
            )
        return "batch"
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
