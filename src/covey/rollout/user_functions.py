"""Users' rollout functions that play one rollout or one group, isolated from the run.

- `async def rollout(row, engine) -> Rollout` plays one rollout (`RolloutFunction`).
- `async def rollouts(row, engine, n) -> list[Rollout]` plays the n completions of a prompt together (`GroupFunction`):
  branches of one tree, players of one game.

Both run on an event loop of their own, so that one that blocks delays only others of its kind, and under a deadline.
Their results are validated: tokens outside of the vocabulary would otherwise fail far from their cause. See also
`user_batch_function`, for functions that play a whole batch.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from covey.core.engine import SampleRequest
from covey.core.records import Completion, Rollout
from covey.rollout.episode import EpisodeEngine, Generate
from covey.rollout.validation import RolloutError as RolloutError
from covey.rollout.validation import RolloutValidator as RolloutValidator
from covey.runtime.loop_thread import CallbackRelay, LoopThread
from covey.runtime.user_code import UserCodeError, is_async

T = TypeVar("T")

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _IsolatedFunction:
    """Runs a user's coroutine function on an event loop of its own, each call for at most `timeout` seconds."""

    def __init__(self, function: Callable[..., Awaitable[Any]], timeout: float, limits: RolloutValidator):
        self._function = function
        self._timeout = timeout
        self._limits = limits
        self._loop = LoopThread("covey-async-tools")
        self._relay = CallbackRelay()

    async def _call(self, engine: EpisodeEngine, check: Callable[[Any], T], *arguments: Any) -> T:
        """`check` of the function's result; on that loop too, since the result's own code may hang."""
        engine.wrap_generate(partial(self._generate_on, asyncio.get_running_loop()))

        async def play() -> T:
            return check(await self._function(*arguments))

        try:
            return await self._loop.call(play, self._timeout)
        except UserCodeError as raised:
            if isinstance(raised.error, RolloutError):
                raise raised.error from None
            raise

    def _generate_on(self, home: asyncio.AbstractEventLoop, generate: Generate) -> Generate:
        """`generate` for code on another loop. Requests of one turn there are submitted in one turn here."""

        async def submit(request: SampleRequest) -> list[Completion]:
            future: Future[list[Completion]] = Future()
            self._relay.send(home, lambda: _run_into(generate(request), future))
            return await asyncio.wrap_future(future)

        return submit


class RolloutFunction(_IsolatedFunction):
    """A user's `async (row, engine) -> Rollout` as an agent."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one rollout."""
        return await self._call(engine, self._checked, row, engine)

    def _checked(self, result: Any) -> Rollout:
        if not isinstance(result, Rollout):
            raise RolloutError(
                f"the rollout function returned {type(result).__name__}; it must return a Rollout, such as"
                " `episode.done()` gives."
            )
        return self._limits.checked(result)


class GroupFunction(_IsolatedFunction):
    """A user's `async (row, engine, n) -> n rollouts`."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """Play n completions of a prompt."""
        return await self._call(engine, partial(self._checked, n), row, engine, n)

    def _checked(self, n: int, result: Any) -> list[Rollout]:
        rollouts = list(result) if isinstance(result, list | tuple) else []
        if len(rollouts) != n or not all(isinstance(rollout, Rollout) for rollout in rollouts):
            kinds = sorted({type(rollout).__name__ for rollout in rollouts})
            got = f"{len(rollouts)} of {', '.join(kinds)}" if rollouts else repr(result)[:60]
            raise RolloutError(
                f"the rollout function was asked for {n} rollouts of a prompt and returned {got}; it must return a list"
                f" of {n} Rollouts, such as `episode.done()` gives."
            )
        return [self._limits.checked(rollout) for rollout in rollouts]  # copies, also of one that is returned twice


def _run_into(work: Coroutine[Any, Any, T], future: "Future[T]") -> None:
    """Run a coroutine on the running loop; result, exception and cancellation go to `future`, and cancellation back."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def settle(task: "asyncio.Task[T]") -> None:
        with suppress(InvalidStateError):  # the future was cancelled
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

    def cancel_task(future: "Future[T]") -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(settle)
    future.add_done_callback(cancel_task)


def form_of(function: Callable[..., Any]) -> str:
    """Form of a `rollout_func`: "rollout", "group" or, if it is no coroutine function, "batch"."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # compiled code without a signature
        return "batch"
    positional = [one for one in parameters if one.kind in POSITIONAL]
    needed = [one.name for one in positional if one.default is one.empty]
    variadic = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if not is_async(function):
        if "engine" in needed:
            raise ValueError(
                f"`rollout_func` is a function of ({', '.join(needed)}) that is not async, and an engine is waited for:"
                " write `async def` and `await episode.sample()`."
            )
        if len(needed) > 2 or (len(positional) < 2 and not variadic):
            raise ValueError(
                f"`rollout_func` is a function of ({', '.join(needed)}), but is called with (prompts, trainer): the"
                " config is `trainer.args`, the tokenizer `trainer.processing_class`."
            )
        return "batch"
    if variadic:
        return "rollout"
    if len(needed) not in (2, 3) or needed[0] == "prompts":
        raise ValueError(
            f"`rollout_func` is an async function of ({', '.join(needed)}), which is none of the forms: `async def"
            " rollout(row, engine)`, `async def rollouts(row, engine, n)`, or, without async, `def rollout(prompts,"
            " trainer)`."
        )
    return "rollout" if len(needed) == 2 else "group"
