"""Users' rollout functions that play one rollout or one group, on an event loop of their own and under a deadline."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, TypeVar

from covey.core.engine import SampleRequest
from covey.core.records import Completion, FinishReason, Message, Rollout
from covey.core.strands import longest
from covey.rollout.episode import EpisodeEngine, seat_problem
from covey.runtime.deadlines import LateCalls
from covey.runtime.loop_thread import LoopThread, send_to
from covey.runtime.user_code import UserCodeError, is_async, parameters_of, settle

T = TypeVar("T")

MAX_LOGPROB = 1e-3  # a log-prob is at most 0, up to rounding


class RolloutError(ValueError):
    """A user's function, environment or tools returned no rollouts that can be trained on."""


class _IsolatedFunction:
    """Runs a user's coroutine function on a separate event loop, each call for at most `timeout` seconds.

    `declared` are the roles that its rollouts have, where they are known before they are played.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        timeout: float,
        limits: "RolloutValidator",
        declared: Sequence[str] = (),
    ):
        self._function, self._timeout, self._limits, self.declared = function, timeout, limits, declared
        self._loop = LoopThread("covey-async-tools")
        self._late = LateCalls("rollout_func")

    async def _call(self, engine: EpisodeEngine, check: Callable[[Any], T], *arguments: Any) -> T:
        """`check` of the function's result, also on that loop, since code of the result itself may hang."""
        pending: set[Future[list[Completion]]] = set()
        home, generate = asyncio.get_running_loop(), engine.send

        async def submit(request: SampleRequest) -> list[Completion]:  # requests of one turn there, in one turn here
            future: Future[list[Completion]] = Future()
            pending.add(future)
            future.add_done_callback(pending.discard)
            if engine.closed:
                future.cancel()
            send_to(home, lambda: _run_into(generate(request), future))
            return await asyncio.wrap_future(future)

        async def play() -> T:
            return check(await self._function(*arguments))

        engine.send = submit
        try:
            return await self._loop.call(play, self._timeout, self._late)
        except UserCodeError as raised:
            if isinstance(raised.error, RolloutError):
                raise raised.error from None
            raise
        finally:
            engine.closed = True  # first: a request that begins now is in `pending`, or sees it
            for future in list(pending):  # the loop here may end before it has answered
                future.cancel()


class RolloutFunction(_IsolatedFunction):
    """A user's `async (row, engine) -> Rollout` as an agent."""

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
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

    def trained(self, seats: Collection[str]) -> list[str]:
        """Roles of a game that opponents (`seats`) do not play, in the order of its rollouts; empty if unknown."""
        return []

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
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
    """Run a coroutine on the running loop, and pass its result, exception or cancellation to `future`.

    Cancelling `future` cancels the task. This works by callbacks of the task, because a task that is cancelled before
    it starts runs no line of its coroutine.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def done(task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            settle(future, error=error, wrap=False)
        else:
            settle(future, task.result())

    def cancel_task(future: "Future[T]") -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(done)
    future.add_done_callback(cancel_task)


def form_of(function: Callable[..., Any]) -> str:
    """Form of a `rollout_func`: "rollout" or "group" for coroutine functions, else "batch".

    ValueError if it cannot be called with the arguments of its form.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return "batch"
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
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


@dataclass(frozen=True)
class RolloutValidator:
    """Checks of a rollout that a user's code returns. `checked` runs code of its values: call it under a deadline."""

    vocabulary: int  # tokens that the model knows
    context: int | None  # most tokens of a rollout; None: unlimited

    def checked(self, rollout: Rollout) -> Rollout:
        """A copy of the rollout with plain values (`extras` is shared); RolloutError if it cannot be trained on."""
        try:
            own = _plain_rollout(rollout)
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError(f"a rollout cannot be used: {error}.") from error
        self._check(own)
        return own

    def _check(self, rollout: Rollout) -> None:
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        wrong = next((one for one in ids if type(one) is not int or not 0 <= one < self.vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"token {wrong!r} of a rollout is not in the model's vocabulary of {self.vocabulary}.")
        if not rollout.prompt_ids:
            raise RolloutError("a rollout has an empty prompt; its prompt_ids need one token at least.")
        if problem := seat_problem(rollout.role, rollout.game):
            raise RolloutError(f"a rollout {problem}")
        size, prompt = len(ids), len(rollout.prompt_ids)
        if rollout.strands:
            before = 0
            for start, follows in rollout.strands:
                if not before < start < size - prompt or not -1 <= follows < prompt + start - 1:
                    raise RolloutError(
                        f"a rollout's strand ({start}, {follows}) must begin after the last one, within the completion,"
                        " and follow a token before the one that it comes after."
                    )
                before = start
            if rollout.media:
                raise RolloutError("a rollout of several strands has images; only one conversation can have them.")
            size = longest(prompt, size - prompt, rollout.strands)
        if self.context is not None and size > self.context:
            raise RolloutError(f"a rollout of {size} tokens exceeds the model's context of {self.context}.")
        if any(not math.isfinite(one) for one in (*(rollout.logprobs or ()), *(rollout.entropies or ()))):
            raise RolloutError("a rollout has log-probs that are not finite; leave `logprobs` None if there are none.")
        most = max(rollout.logprobs or (), default=0.0)
        if most > MAX_LOGPROB:
            raise RolloutError(f"a rollout has a log-prob of {most:g}, and probabilities are at most 1.")


def _plain_rollout(rollout: Rollout) -> Rollout:
    finish, error = FinishReason(rollout.finish), None if rollout.error is None else _text(rollout.error)
    return replace(
        rollout,
        prompt_ids=list(rollout.prompt_ids),
        completion_ids=list(rollout.completion_ids),
        sampled=[bool(one) for one in rollout.sampled],
        logprobs=_of_sampled(rollout.logprobs, rollout.sampled),
        completion=_text_or_messages(rollout.completion, "completion"),
        finish=finish,
        entropies=_of_sampled(rollout.entropies, rollout.sampled),
        media=tuple(rollout.media),
        extras={_text(name): value for name, value in rollout.extras.items()},
        reused=int(rollout.reused),
        versions=_each(int, rollout.versions),
        observed=_each(int, rollout.observed),
        strands=[(int(start), int(follows)) for start, follows in rollout.strands],
        turn_ends=[int(one) for one in rollout.turn_ends],
        calls={_text(outcome): int(count) for outcome, count in rollout.calls.items()},
        error=error or ("the rollout function returned it as failed" if finish is FinishReason.ERROR else None),
        tool_seconds=float(rollout.tool_seconds),
        prompt=None if rollout.prompt is None else _text_or_messages(rollout.prompt, "prompt"),
        role=_text(rollout.role),
        game=int(rollout.game),
    )


def _each(kind: Callable[[Any], Any], values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else [kind(one) for one in values]


def _of_sampled(values: Iterable[Any] | None, sampled: Sequence[Any]) -> list[float] | None:
    """Numbers of the tokens that were sampled; others have none, whatever stands in their places (None, NaN, ...)."""
    if values is None:
        return None
    own = list(values)
    if len(own) != len(sampled):
        return [float(one) for one in own]  # which the record refuses
    return [float(one) if flag else 0.0 for one, flag in zip(own, sampled, strict=True)]


def _text_or_messages(value: Any, name: str) -> str | list[Message]:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple) and all(isinstance(one, dict) and "role" in one for one in value):
        return [_plain(one) for one in value]
    raise TypeError(f"its {name} must be text or a list of messages with a 'role', not {type(value).__name__}")


def _plain(value: Any) -> Any:
    """A copy with plain values, as chat templates and logs need them; images are kept, other objects become text."""
    if isinstance(value, dict):
        return {_text(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if type(value) in (int, float, bool, NoneType) or type(value).__module__.startswith("PIL."):
        return value
    return _text(value)


def _text(value: Any) -> str:
    """Text without lone surrogates, which tokenizers and files cannot hold."""
    return str.__str__(str(value)).encode("utf-8", "replace").decode()
