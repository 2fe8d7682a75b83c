"""Rollout functions of the user's own, in their two forms, kept from harming the run.

- `async def rollout(row, engine) -> Rollout` plays one rollout (`RolloutFunction`). It runs on an event loop apart, so
  that one that blocks delays nothing but others of its kind, and under a deadline.
- `def rollout_func(prompts, trainer) -> dict` plays all of a generation at once (`BatchFunction`). It runs on a thread
  of its own and samples with `trainer.generate_completions`.

What they return is checked: tokens outside of the vocabulary would otherwise end the run far from their cause.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from covey.core.rollout import Completion, FinishReason, Rollout
from covey.rollout.engine import SampleRequest, SamplingParams
from covey.rollout.episode import Ask, EpisodeEngine
from covey.rollout.merging import MergedRequests
from covey.rollout.prompts import PromptCodec
from covey.rollout.seeds import sample_seed
from covey.rollout.tools.execution import CoroutineLoop, Handovers, Raised, TimedOut, is_async, run_in_thread

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


class RolloutFunction:
    """A user's `async (row, engine) -> Rollout` as an agent.

    Args:
        function: plays one rollout.
        timeout: seconds that it may take.
        limits: of its tokens.
    """

    def __init__(
        self, function: Callable[[dict[str, Any], EpisodeEngine], Awaitable[Rollout]], timeout: float, limits: Limits
    ):
        self._function = function
        self._timeout = timeout
        self._limits = limits
        self._loop = CoroutineLoop()
        self._handovers = Handovers()

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one rollout.

        Raises:
            TimedOut, Raised: as `CoroutineLoop.run`.
            RolloutError: what it returned is no rollout that can be trained on.
        """
        engine.ask_through(partial(self._across, asyncio.get_running_loop()))
        rollout = await self._loop.run(lambda: self._function(row, engine), self._timeout)
        if not isinstance(rollout, Rollout):
            raise RolloutError(
                f"the rollout function returned {type(rollout).__name__}; it must return a Rollout, such as"
                " `episode.done()` gives."
            )
        self._limits.check(rollout)
        return rollout

    def _across(self, home: asyncio.AbstractEventLoop, ask: Ask) -> Ask:
        """The engine for code on another loop. What is asked there in one turn is asked here in one turn too."""

        async def from_there(request: SampleRequest) -> list[Completion]:
            answer: Future[list[Completion]] = Future()
            self._handovers.to(home).give(lambda: _answer(ask(request), answer))
            return await asyncio.wrap_future(answer)

        return from_there


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


class _Sampling:
    """Completions for a function that runs on another thread than the engine."""

    def __init__(
        self,
        merged: MergedRequests,
        codec: PromptCodec,
        params: SamplingParams,
        seed_key: tuple[int | str, ...],
        loop: asyncio.AbstractEventLoop,
    ):
        self._merged, self._codec, self._params, self._key, self._loop = merged, codec, params, seed_key, loop
        self._calls = 0

    def complete(self, prompts: Sequence[Any], changes: dict[str, Any]) -> list[tuple[list[int], Completion]]:
        known = {one.name for one in fields(SamplingParams)}
        if unknown := sorted(set(changes) - known):
            raise RolloutError(
                f"no such sampling setting: {', '.join(unknown)}. There are: {', '.join(sorted(known))}."
            )
        params, call = replace(self._params, **changes), self._calls
        self._calls += 1
        encoded = [list(one) if _is_tokens(one) else self._codec.encode(one) for one in prompts]
        seeds = [sample_seed(*self._key, "call", call, i) for i in range(len(prompts))]

        async def sample() -> list[list[Completion]]:
            asked = (SampleRequest(ids, 1, params, [seed]) for ids, seed in zip(encoded, seeds, strict=True))
            return await asyncio.gather(*(self._merged.generate(request) for request in asked))

        answers = asyncio.run_coroutine_threadsafe(sample(), self._loop).result()
        return [(ids, answer[0]) for ids, answer in zip(encoded, answers, strict=True)]


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, int) for one in prompt)


class BatchFunction:
    """A user's `(prompts, trainer) -> dict`, for all prompts of a generation at once.

    The dictionary holds, for every prompt, a list in `prompt_ids`, `completion_ids` and `logprobs` (which may be None).
    `env_mask` may say with 1 and 0 which completion tokens the policy chose. Every other field goes to the reward
    functions, an element per prompt.

    Args:
        function: the user's.
        trainer: handed to it.
        timeout: seconds that it may take.
        codec: decodes what it returns.
        limits: of its tokens.
        end_ids: tokens that end a completion; one that ends otherwise was cut off.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        trainer: Any,
        timeout: float,
        codec: PromptCodec,
        limits: Limits,
        end_ids: Collection[int],
    ):
        self._function = function
        self._trainer = trainer
        self._timeout = timeout
        self._codec = codec
        self._limits = limits
        self._end_ids = frozenset(end_ids)
        self._sampling: _Sampling | None = None

    @contextmanager
    def sampling(
        self, merged: MergedRequests, codec: PromptCodec, params: SamplingParams, seed_key: tuple[int | str, ...]
    ) -> Iterator[None]:
        """Within this context `complete` samples: with these settings, on the event loop that is running now."""
        self._sampling = _Sampling(merged, codec, params, seed_key, asyncio.get_running_loop())
        try:
            yield
        finally:
            self._sampling = None
            merged.close()

    def complete(self, prompts: Sequence[Any], **changes: Any) -> list[tuple[list[int], Completion]]:
        """For the user's function, while it runs: a completion of each prompt, with the prompt's tokens.

        Args:
            prompts: texts, messages or lists of tokens.
            changes: fields of `SamplingParams` that differ from the config's.

        Raises:
            RolloutError: called at another time, or with a setting that does not exist.
        """
        if self._sampling is None:
            raise RolloutError("completions can be had here only while rollout_func runs.")
        return self._sampling.complete(prompts, changes)

    async def __call__(self, prompts: Sequence[Any]) -> list[Rollout]:
        """One rollout for each prompt, in their order.

        Raises:
            RolloutError: the function took too long, or returned something else than described.
            Exception: what it raised.
        """

        def run() -> list[Rollout]:
            return self._rollouts(prompts, self._function(list(prompts), self._trainer))

        try:
            return await run_in_thread(run, self._timeout)
        except TimedOut:
            raise RolloutError(
                f"rollout_func took longer than rollout_timeout={self._timeout:g} s for {len(prompts)} prompts. Raise"
                " rollout_timeout, or find out what it waits for."
            ) from None
        except Raised as raised:
            raise raised.error from None

    def _rollouts(self, prompts: Sequence[Any], returned: Any) -> list[Rollout]:
        needed = ("prompt_ids", "completion_ids", "logprobs")
        if not isinstance(returned, dict) or any(name not in returned for name in needed):
            raise RolloutError(
                f"rollout_func must return a dictionary with {', '.join(needed)}, got"
                f" {sorted(returned) if isinstance(returned, dict) else type(returned).__name__}. logprobs may be None."
            )
        for name, values in returned.items():
            if values is None and name not in needed[:2]:
                continue
            if not hasattr(values, "__len__") or len(values) != len(prompts):
                count = len(values) if hasattr(values, "__len__") else type(values).__name__
                raise RolloutError(
                    f"rollout_func returned {count} elements in {name!r} for {len(prompts)} prompts; it needs one for"
                    " each (every prompt comes as many times as it is to be completed)."
                )
        extras = {name: values for name, values in returned.items() if name not in (*needed, "env_mask")}
        rollouts = []
        for i, prompt in enumerate(prompts):
            completion_ids = [int(one) for one in returned["completion_ids"][i]]
            logprobs, mask = returned["logprobs"], returned.get("env_mask")
            rollout = Rollout(
                prompt_ids=[int(one) for one in returned["prompt_ids"][i]],
                completion_ids=completion_ids,
                sampled=[True] * len(completion_ids) if mask is None else [bool(one) for one in mask[i]],
                logprobs=None if logprobs is None or logprobs[i] is None else [_single(one) for one in logprobs[i]],
                completion=self._codec.decode(prompt, completion_ids),
                finish=FinishReason.STOP if set(completion_ids[-1:]) & self._end_ids else FinishReason.LENGTH,
                extras={name: None if values is None else values[i] for name, values in extras.items()},
            )
            self._limits.check(rollout)
            rollouts.append(rollout)
        return rollouts


def _single(logprob: Any) -> float:
    """A log-prob; servers that report the most probable tokens give a list, the sampled one first."""
    return float(logprob[0] if isinstance(logprob, list | tuple) else logprob)


def plays_one_rollout(function: Callable[..., Any]) -> bool:
    """Whether a `rollout_func` is of the form `async (row, engine)` rather than `(prompts, trainer)`."""
    return is_async(function)
