"""Token sampling: filters, and an exponential race over random numbers that are a function of seed and step.

A sample depends on its row's logits, seed and step alone, never on the other rows of the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.engine import SamplingParams

BLOCK = 256
"""Tokens in one block of the race."""

CPU_CHUNK = 1 << 19
"""Logits sampled from at a time on a CPU, so that they stay in the processor's cache."""

_NEGLIGIBLE = -200.0  # its exp is 0 in float32, and 0 times it is 0, unlike 0 times -inf

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number: splitmix64's stride
_STEP = -0x2E0A2D0F7C9D4A35  # an odd stride for steps, far from multiples of the other
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


class SampledTokens(NamedTuple):
    """Tokens [R] with the log-probabilities [R] of them and the entropies [R] of their distributions.

    Both at the sampling temperature, before any filter.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def sample_tokens(
    logits: Tensor, seeds: Tensor, steps: Tensor, params: SamplingParams, seen: Tensor | None = None
) -> SampledTokens:
    """Sample one token per row.

    Args:
        logits: [R, V], any float type.
        seeds: [R] int64.
        steps: [R] int64, tokens sampled before: the same seed and step meet the same random numbers.
        params: temperature and filters.
        seen: [R, V] bool, tokens already in the sequence, for the repetition penalty.
    """
    rows = len(logits) if logits.is_cuda else max(1, CPU_CHUNK // logits.shape[-1])
    if len(logits) <= rows:
        return _sample_chunk(logits, seeds, steps, params, seen)
    chunks = [
        _sample_chunk(logits[chunk], seeds[chunk], steps[chunk], params, None if seen is None else seen[chunk])
        for chunk in (slice(start, start + rows) for start in range(0, len(logits), rows))
    ]
    return concatenate(chunks)


def _sample_chunk(
    logits: Tensor, seeds: Tensor, steps: Tensor, params: SamplingParams, seen: Tensor | None
) -> SampledTokens:
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
        _, filtered, _ = _weights(logits)
        tokens = exponential_race(filtered, block_sums(filtered), seeds, steps)
    else:
        tokens = exponential_race(weights, blocks, seeds, steps)
    log_total = total.log()
    logprobs = (reported.gather(-1, tokens[:, None]) - top)[:, 0] - log_total
    entropies = log_total - torch.linalg.vecdot(weights, below) / total
    return SampledTokens(tokens, logprobs, entropies)


def score_tokens(logits: Tensor, tokens: Tensor, temperature: float) -> SampledTokens:
    """Score given tokens [R] under logits [R, V] as `sample_tokens` reports sampled ones."""
    logits = logits.float()
    reported = logits if temperature in (0.0, 1.0) else logits / temperature
    top, weights, below = _weights(reported)
    total = weights.sum(-1)
    logprobs = (reported.gather(-1, tokens[:, None]) - top)[:, 0] - total.log()
    return SampledTokens(tokens, logprobs, total.log() - torch.linalg.vecdot(weights, below) / total)


def concatenate(chunks: list[SampledTokens]) -> SampledTokens:
    """Chunks of rows as one."""
    return SampledTokens(*(torch.cat(column) for column in zip(*chunks, strict=True)))


def _weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit [R, 1], probabilities up to a factor per row [R, V], and logits minus the largest [R, V]."""
    top = logits.amax(-1, keepdim=True)
    below = (logits - top).clamp_(min=_NEGLIGIBLE)
    return top, below.exp(), below


def filter_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [R, V] after repetition penalty, temperature, top-k, top-p and min-p; -inf where a token is excluded."""
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
    """Weight of each block of `BLOCK` neighbouring tokens: [R, V] -> [R, ceil(V / BLOCK)]."""
    whole = weights.shape[-1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1) if whole else weights[:, :0]
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)


def exponential_race(weights: Tensor, blocks: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Sample a block, then a token within it, each as the winner of an exponential race: [R, V] -> [R].

    In a race contestant i arrives at time E_i / w_i, E_i ~ Exp(1), and is the first with probability w_i / sum(w)
    (the Gumbel-max trick on another scale). Blocks race with their sums and the tokens of the winning block with
    their own weights: token i wins with probability (P_b / P) (w_i / P_b) = w_i / P, exactly, for V / BLOCK + BLOCK
    random numbers instead of V. Every contestant has its own random number, so a small change of the weights changes a
    sample only where two contestants nearly tie; inverting the cumulative distribution would carry the change of
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


# ---- random numbers --------------------------------------------------------------------------------------------------


def uniforms(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """Uniform random numbers that are a hash of seed, step and index, without any state.

    They are the same in any batch, order and device, and can be computed again later to verify a draft. Every
    (seed, step) pair starts a splitmix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) at a hashed state.

    Args:
        seeds: [R] int64.
        steps: [R] int64, index of the token within its completion.
        count: numbers per pair.

    Returns:
        [R, count] float64, strictly between 0 and 1.
    """
    start = _mix(_mix(seeds) + steps * _STEP)
    offsets = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    return _between_0_and_1(_shift(_mix(start[:, None] + offsets), 12))


def _between_0_and_1(bits: Tensor) -> Tensor:
    """Integers of 52 bits to the middles of 2**52 equal intervals; with 53 bits the last would round to 1."""
    return bits.double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every input bit affects every output bit."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
