"""Users' rollout functions that play a whole batch at once: `def rollout(prompts, trainer) -> dict`."""

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import Media
from covey.core.records import Completion, FinishReason, Rollout
from covey.rollout.images import ImageError
from covey.rollout.prompts import PromptCodec, sample_seed
from covey.rollout.request_coalescing import RequestCoalescer
from covey.rollout.user_functions import RolloutError, RolloutValidator
from covey.rollout.vision import Encoded, Vision
from covey.runtime.calling_thread import call_here, is_threaded
from covey.runtime.deadlines import CallTimeout, LateCalls, StillRunning
from covey.runtime.user_code import UserCodeError


@dataclass(eq=False)
class BatchSampler:
    """Samples completions for a function on another thread than the engine. Created on the engine's event loop."""

    coalescer: RequestCoalescer
    codec: PromptCodec
    params: SamplingParams
    seed_key: tuple[int | str, ...]
    limits: Mapping[tuple[int, ...], int] = field(
        default_factory=dict
    )  # tokens after each prompt, if sources limit them
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    calls: int = 0

    def generate_completions(self, prompts: Sequence[Any], changes: dict[str, Any]) -> list[dict[str, Any]]:
        params, call = self.params.changed(changes, "generate_completions"), self.calls
        self.calls += 1
        encoded = [self._encode(prompt) for prompt in prompts]
        requests = [
            SampleRequest(
                prompt.ids,
                1,
                self._within(params, prompt.ids),
                [sample_seed(*self.seed_key, "call", call, i)],
                media=prompt.media,
            )
            for i, prompt in enumerate(encoded)
        ]

        async def sample() -> list[list[Completion]]:
            return await asyncio.gather(*map(self.coalescer.generate, requests))

        completions = asyncio.run_coroutine_threadsafe(sample(), self.loop).result()
        return [
            {
                "prompt_ids": prompt.ids,
                "completion_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": self.codec.text_of(completion.token_ids),
            }
            for prompt, (completion,) in zip(encoded, completions, strict=True)
        ]

    def _within(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """Settings with the remaining limit of the source to whose prompt these tokens belong."""
        begins = [known for known in self.limits if tuple(ids[: len(known)]) == known]
        if not begins:
            return params
        longest = max(begins, key=len)
        left = max(self.limits[longest] - (len(ids) - len(longest)), 1)
        return params if left >= params.max_tokens else replace(params, max_tokens=left)

    def _encode(self, prompt: Any) -> Encoded:
        if not (isinstance(prompt, list | tuple) and prompt and all(isinstance(token, int) for token in prompt)):
            return self.codec.read(prompt)
        vision = self.codec.vision
        if vision is not None and not vision.placeholders.isdisjoint(prompt):
            raise RolloutError(
                "a prompt given as tokens contains image tokens, but no images: give `generate_completions` messages"
                " with the images in their parts, as rollout_func gets them in its prompts."
            )
        return Encoded(list(prompt))


_CURRENT: ContextVar[BatchSampler | None] = ContextVar("covey_sampling", default=None)  # of the calling function


@dataclass(eq=False)
class BatchFunction:
    """A user's `(prompts, trainer) -> dict`, for all prompts of a batch at once.

    The dictionary has lists with one element per prompt: `prompt_ids`, `completion_ids` and `logprobs` (which may be
    None as a whole), and optionally `env_mask` and `images`. Log-probs of tokens with `env_mask` 0 are not read. Every
    other field is passed to the reward functions.
    """

    function: Callable[..., Any]
    trainer: Any
    timeout: float  # seconds
    codec: PromptCodec
    limits: RolloutValidator
    end_ids: Collection[int]  # a completion whose last token is another one was cut off
    _samplers: list[BatchSampler] = field(default_factory=list, init=False)  # of the batches in flight
    _late: LateCalls = field(default_factory=partial(LateCalls, "rollout_func"), init=False)

    def generate_completions(self, prompts: Sequence[Any], **changes: Any) -> list[dict[str, Any]]:
        """See `OnlineTrainer.generate_completions`."""
        current = _CURRENT.get()
        if current is None and len(self._samplers) == 1:
            (current,) = self._samplers  # the caller is on a thread that the function has started
        if current is None or current not in self._samplers:
            raise RolloutError(
                "completions are sampled only while rollout_func runs, and on its own thread where several batches are"
                " in flight."
            )
        return current.generate_completions(prompts, changes)

    async def __call__(
        self, prompts: Sequence[Any], images: Sequence[Sequence[Any]], sampler: BatchSampler
    ) -> list[Rollout]:
        """Rollouts of all prompts; the function's calls of `generate_completions` go to the sampler."""

        def run() -> list[Rollout]:
            shared = {id(image): image for shown in images for image in shown}
            own_prompts = copy.deepcopy(list(prompts), shared)
            return self._rollouts(prompts, images, self.function(own_prompts, self.trainer))

        self._samplers.append(sampler)
        token = _CURRENT.set(sampler)
        try:
            return await call_here(run, self.timeout, self._late, threaded=is_threaded(self.function))
        except StillRunning as refused:
            raise RolloutError(f"rollout_func failed: {refused}") from None
        except CallTimeout:
            raise RolloutError(
                f"rollout_func took longer than rollout_timeout={self.timeout:g} s for {len(prompts)} prompts. Raise"
                " rollout_timeout, or find out what it waits for."
            ) from None
        except UserCodeError as raised:
            if isinstance(raised.error, Exception):
                raise raised.error from None
            raise RolloutError(f"rollout_func raised {raised}") from raised.error  # SystemExit would end silently
        finally:
            _CURRENT.reset(token)
            self._samplers.remove(sampler)
            sampler.coalescer.close()

    def _rollouts(self, prompts: Sequence[Any], images: Sequence[Sequence[Any]], returned: Any) -> list[Rollout]:
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
                    " each (a prompt is repeated for each of its completions)."
                )
        vision = self.codec.vision
        read = (*needed, "env_mask", *(["images"] if vision is not None else []))
        extras = {name: values for name, values in returned.items() if name not in read}
        rollouts = []
        for i, prompt in enumerate(prompts):
            completion_ids = [int(token) for token in returned["completion_ids"][i]]
            logprobs, mask = _item(returned["logprobs"], i), _item(returned.get("env_mask"), i)
            for name, values in (("logprobs", logprobs), ("env_mask", mask)):
                if values is not None and len(values) != len(completion_ids):
                    raise RolloutError(
                        f"rollout_func returned {len(values)} {name} for the {len(completion_ids)} completion_ids of"
                        f" prompt {i}; it needs one for each."
                    )
            if logprobs is not None:  # servers that report the most probable tokens give a list, the sampled one first
                logprobs = [one[0] if isinstance(one, list | tuple) and one else one for one in logprobs]
            sampled = [True] * len(completion_ids) if mask is None else [bool(flag) for flag in mask]
            rollout = Rollout(
                prompt_ids=[int(token) for token in returned["prompt_ids"][i]],
                completion_ids=completion_ids,
                sampled=sampled,
                logprobs=logprobs,
                completion=self.codec.decode(prompt, completion_ids),
                finish=FinishReason.STOP if set(completion_ids[-1:]) & set(self.end_ids) else FinishReason.LENGTH,
                extras={name: _item(values, i) for name, values in extras.items()},
                turn_ends=[end for end, (now, then) in enumerate(pairwise([*sampled, False])) if now and not then],
            )
            rollout = self.limits.checked(rollout)
            if vision is not None:
                own_images = _item(returned.get("images"), i)
                rollout.media = _find_media(vision, rollout, own_images, images[i], i)
            rollouts.append(rollout)
        return rollouts


def _find_media(vision: Vision, rollout: Rollout, own: Any, of_row: Sequence[Any], number: int) -> tuple[Media, ...]:
    ids = rollout.prompt_ids + rollout.completion_ids
    written = [True] * len(rollout.prompt_ids) + [not flag for flag in rollout.sampled]
    if own is None and vision.placeholders.isdisjoint(id_ for id_, other in zip(ids, written, strict=True) if other):
        return ()
    if own is not None and not isinstance(own, list | tuple):
        raise RolloutError(
            f"rollout_func returned {type(own).__name__} in 'images' for prompt {number}; it needs a list of images for"
            " each prompt, or None."
        )
    try:
        return vision.find(ids, of_row if own is None else own, written)
    except ImageError as error:
        raise RolloutError(
            f"the tokens that rollout_func returned for prompt {number} do not show the images"
            f" {'of its row' if own is None else 'that it returned with them'}: {error} Return the prompt_ids that"
            " `generate_completions` gives, and in 'images' for each prompt a list of what its tokens show, in order."
        ) from error


def _item(values: Any, index: int) -> Any:
    return None if values is None else values[index]
