"""Drawing tokens from logits: filters, and a race between tokens that every row runs on noise of its own.

A sample depends on its row's logits, seed and step alone, never on its neighbours in the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.engine import SamplingParams
from covey.engines.native.counter_rng import uniforms

BLOCK = 256
"""Tokens in one block of the race."""

CACHED = 1 << 19
"""On a CPU, logits are drawn from this many at a time: the passes over them then run in the processor's cache."""

_NOTHING = -200.0  # exp of it is 0 in float32, and 0 times it is 0, unlike 0 times -inf


class SampledTokens(NamedTuple):
    """Tokens [R], their log-probabilities [R] and the entropies [R] of what they were drawn from.

    Both at the sampling temperature, before any token was filtered out.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def draw(
    logits: Tensor, seeds: Tensor, steps: Tensor, params: SamplingParams, seen: Tensor | None = None
) -> SampledTokens:
    """Sample one token per row.

    Args:
        logits: [R, V], any float type.
        seeds: [R] int64, each row's own.
        steps: [R] int64, how many tokens the row has sampled before: the same seed and step meet the same noise.
        params: temperature and filters.
        seen: [R, V] bool, tokens already in the row, for the repetition penalty.

    Returns:
        Tokens, log-probs and entropies, [R] each.
    """
    rows = len(logits) if logits.is_cuda else max(1, CACHED // logits.shape[-1])
    if len(logits) <= rows:
        return _draw(logits, seeds, steps, params, seen)
    parts = [
        _draw(logits[some], seeds[some], steps[some], params, None if seen is None else seen[some])
        for some in (slice(start, start + rows) for start in range(0, len(logits), rows))
    ]
    return SampledTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _draw(logits: Tensor, seeds: Tensor, steps: Tensor, params: SamplingParams, seen: Tensor | None) -> SampledTokens:
    logits = logits.float()
    reported = logits if params.temperature in (0.0, 1.0) else logits / params.temperature
    top, weights, below = _weights(reported)
    blocks = block_sums(weights)
    total = blocks.sum(-1)
    if params.truncates:
        logits = filter_logits(logits, params, seen)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    elif params.truncates:
        _, kept, _ = _weights(logits)
        tokens = race(kept, block_sums(kept), seeds, steps)
    else:
        tokens = race(weights, blocks, seeds, steps)
    log_total = total.log()
    logprobs = (reported.gather(-1, tokens[:, None]) - top)[:, 0] - log_total
    entropies = log_total - torch.linalg.vecdot(weights, below) / total
    return SampledTokens(tokens, logprobs, entropies)


def describe(logits: Tensor, tokens: Tensor, temperature: float) -> SampledTokens:
    """Log-probs and entropies as `draw` reports them, of tokens [R] that are given: logits [R, V] -> [R] each."""
    logits = logits.float()
    reported = logits if temperature in (0.0, 1.0) else logits / temperature
    top, weights, below = _weights(reported)
    total = weights.sum(-1)
    logprobs = (reported.gather(-1, tokens[:, None]) - top)[:, 0] - total.log()
    return SampledTokens(tokens, logprobs, total.log() - torch.linalg.vecdot(weights, below) / total)


def _weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, V] -> the largest logit [R, 1], probabilities up to a factor per row, and how far below it each logit is."""
    top = logits.amax(-1, keepdim=True)
    below = (logits - top).clamp_(min=_NOTHING)
    return top, below.exp(), below


def filter_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [R, V] after repetition penalty, temperature, top-k, top-p and min-p; -inf where a token is ruled out."""
    if params.repetition_penalty != 1.0 and seen is not None:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the more probable tokens: the first token always stays
        drop = (before >= params.top_p).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    if params.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def block_sums(weights: Tensor) -> Tensor:
    """[R, V] -> [R, ceil(V / BLOCK)], the weight of every block of neighbouring tokens."""
    whole = weights.shape[-1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1) if whole else weights[:, :0]
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)


def race(weights: Tensor, blocks: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """A block, then a token within it, each the winner of an exponential race: [R, V] -> [R].

    In a race contestant i arrives at time E_i / w_i, E_i ~ Exp(1), and is the first with probability w_i / sum(w)
    (the Gumbel-max trick on another scale). Blocks race with their sums and the tokens of the winning block with
    their own weights: token i wins with probability (P_b / P) (w_i / P_b) = w_i / P, exactly, for V / BLOCK + BLOCK
    random numbers instead of V. Every contestant has noise of its own, so a small change of the weights changes a
    sample only where two contestants all but tie; walking along the cumulative distribution would carry the change of
    every earlier token to the later ones. float64, so that the tail of a large vocabulary keeps its share.

    Args:
        weights: [R, V] probabilities up to a factor per row.
        blocks: [R, ceil(V / BLOCK)] their `block_sums`.
        seeds: [R] int64.
        steps: [R] int64.
    """
    count = blocks.shape[-1]
    arrival = uniforms(seeds, steps, count + BLOCK).log_()  # log u = -E: the largest quotient is the first to arrive
    block = (arrival[:, :count] / blocks).argmax(-1, keepdim=True)
    members = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    last = weights.shape[-1] - 1
    inside = weights.gather(-1, members.clamp(max=last)).masked_fill_(members > last, 0.0)
    return block[:, 0] * BLOCK + (arrival[:, count:] / inside).argmax(-1)
