"""Drawing tokens from logits: filters, and a random stream of its own for every row.

A sample depends on its row's logits and its row's generator alone, never on its neighbours in the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covey.rollout.engine import SamplingParams


class Drawn(NamedTuple):
    """Tokens [R], their log-probabilities [R] and the entropies [R] of what they were drawn from.

    Both at the sampling temperature, before any token was filtered out.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def draw(
    logits: Tensor, generators: Sequence[torch.Generator], params: SamplingParams, seen: Tensor | None = None
) -> Drawn:
    """Sample one token per row.

    Args:
        logits: [R, V], any float type.
        generators: one per row, on the logits' device; each advances by V numbers.
        params: temperature and filters.
        seen: [R, V] bool, tokens already in the row, for the repetition penalty.

    Returns:
        Tokens, log-probs and entropies, [R] each.
    """
    logits = logits.float()
    reported = logits / (params.temperature if params.temperature > 0 else 1.0)
    log_z = reported.logsumexp(-1)
    probs = (reported - log_z[:, None]).exp_()
    entropies = log_z - torch.linalg.vecdot(probs, reported.nan_to_num(neginf=0.0))
    if params.temperature == 0:
        tokens = filter_logits(logits, params, seen).argmax(-1)
    else:
        tokens = exponential_race(
            filter_logits(logits, params, seen).softmax(-1) if params.truncates else probs, generators
        )
    return Drawn(tokens, reported.gather(-1, tokens[:, None])[:, 0] - log_z, entropies)


def filter_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [R, V] after repetition penalty, temperature, top-k, top-p and min-p; -inf where a token is ruled out."""
    if params.repetition_penalty != 1.0 and seen is not None:
        penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if params.temperature > 0:
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


def exponential_race(probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """The winner of a race in which token i arrives at time E_i / p_i, E_i ~ Exp(1): [R, V] -> [R].

    It wins with probability p_i exactly (the Gumbel-max trick on another scale). Each token has noise of its own, so
    rounding of the probabilities changes a sample only where two tokens all but tie; walking along the cumulative
    distribution would carry the rounding of every earlier token to the later ones. float64, so that the tail of a
    large vocabulary keeps its share.
    """
    winners = []
    for row, generator in zip(probs, generators, strict=True):
        uniform = torch.rand(row.shape, dtype=torch.float64, device=row.device, generator=generator)
        winners.append(uniform.log_().div_(row).argmax())  # log u = -E: the largest is the first to arrive
    return torch.stack(winners)
