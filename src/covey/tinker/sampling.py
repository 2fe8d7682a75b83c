"""Samples and log-probs of prompts: from a request to its answer."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from covey.core.engine import SampleRequest
from covey.core.records import Completion, FinishReason
from covey.tinker.adapter import added
from covey.tinker.learner import Base
from covey.tinker.requests import SampleAsked
from covey.tinker.wire import NO_TOKEN, Sampled, SampledSequence, TopK, WireTensor
from covey.tinker.work import WeightSnapshot


def seed_of(*parts: Any) -> int:
    """A seed of 63 bits that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def engine_request(asked: SampleAsked, place: tuple[Any, ...]) -> SampleRequest:
    """The engine's request; `place` decides the random numbers where the client names no seed."""
    first = place if asked.seed is None else (asked.seed,)
    seeds = [seed_of(*first, number) for number in range(asked.n)]
    return SampleRequest(asked.prompt, asked.n, asked.params, seeds)


def scores_prompt(asked: SampleAsked) -> bool:
    return asked.prompt_logprobs or asked.top_prompt > 0 or asked.targets is not None


@torch.no_grad()
def answered(
    base: Base, snapshot: WeightSnapshot | None, asked: SampleAsked, completions: Sequence[Completion]
) -> Sampled:
    """The answer to a request: samples, and the scores of its prompt that it asks for, under the same weights.

    Log-probs of the prompt and of named tokens are at temperature 1, as in training. Log-probs of samples, and of the
    most probable tokens at their positions, are at the sampling temperature.
    """
    tops: list[TopK | None] = [None] * len(completions)
    prompt_logprobs = prompt_top = targets = None
    # Without anything to score this runs while another thread may train, so the model stays as it is.
    scores = scores_prompt(asked) or asked.top_sampled > 0
    with added(base.model, snapshot.low_rank) if scores and snapshot is not None else nullcontext():
        if asked.top_sampled:
            tops = [_top_of_sample(base, asked, one) for one in completions]
        prompt_logprobs, prompt_top, targets = _of_prompt(base, asked)
    sequences = [
        SampledSequence(one.token_ids, one.logprobs or [], one.finish is FinishReason.STOP, top)
        for one, top in zip(completions, tops, strict=True)
    ]
    return Sampled(sequences, prompt_logprobs, prompt_top, targets)


def _of_prompt(base: Base, asked: SampleAsked) -> tuple[np.ndarray[Any, Any] | None, TopK | None, WireTensor | None]:
    if not scores_prompt(asked):
        return None, None, None
    prompt = asked.prompt
    logprobs = np.full(len(prompt), np.nan, np.float32)
    first = 1 if asked.last_n is None else len(prompt) - asked.last_n
    wanted = None if asked.targets is None else torch.from_numpy(asked.targets.dense(-1))
    if len(prompt) == 1:
        scores = None
    else:
        named = None if wanted is None else torch.cat([wanted, wanted.new_full((1, wanted.shape[1]), -1)])
        scores = base.scores([prompt], torch.tensor([*prompt[1:], 0]), named=named, top=asked.top_prompt)
        logprobs[first:] = scores.logprobs[:-1].float().cpu().numpy()[first - 1 :]
    top = None
    if asked.top_prompt:
        top = _empty(len(prompt), asked.top_prompt)
        if scores is not None:
            _fill(top, slice(first, None), scores, slice(first - 1, -1))
    target_logprobs = None
    if asked.targets is not None and scores is not None and scores.named is not None:
        found = scores.named[:-1].float().cpu().numpy()
        target_logprobs = _like(asked.targets, found)
    return (logprobs if asked.prompt_logprobs else None), top, target_logprobs


def _top_of_sample(base: Base, asked: SampleAsked, one: Completion) -> TopK | None:
    """The most probable tokens at each position of a sample, at the sampling temperature."""
    if not one.token_ids:
        return None
    whole = [*asked.prompt, *one.token_ids]
    temperature = asked.params.temperature or 1.0
    with base.scorer.at_temperature(temperature):
        scores = base.scores([whole[:-1]], torch.tensor(whole[1:]), top=asked.top_sampled)
    top = _empty(len(one.token_ids), asked.top_sampled)
    _fill(top, slice(None), scores, slice(len(asked.prompt) - 1, None))
    return top


def _empty(length: int, k: int) -> TopK:
    token, logprob = NO_TOKEN
    return TopK(np.full((length, k), token, np.int32), np.full((length, k), logprob, np.float32))


def _fill(top: TopK, rows: slice, scores: Any, of: slice) -> None:
    ids, logprobs = scores.top_ids[of].cpu().numpy(), scores.top_logprobs[of].float().cpu().numpy()
    known = ids >= 0
    top.ids[rows][known] = ids[known]
    top.logprobs[rows][known] = logprobs[known]


def _like(asked: WireTensor, found: np.ndarray[Any, Any]) -> WireTensor:
    """Log-probs in the form of the tensor of targets: dense, or its listed cells alone; 0 where none was asked for."""
    found = np.where(np.isfinite(found), found, np.where(asked.dense(-1) < 0, 0.0, -math.inf)).astype(np.float32)
    if asked.rows is None or asked.columns is None:
        return WireTensor(found.reshape(-1), asked.shape)
    cells = found[np.repeat(np.arange(asked.shape[0]), np.diff(asked.rows)), asked.columns]
    return WireTensor(cells, asked.shape, asked.rows, asked.columns)
