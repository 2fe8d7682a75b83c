"""Supervised terms of the loss: cross-entropy on tokens that the policy did not sample (`covey.core.terms`)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.records import WRITERS
from covey.core.terms import TermInputs

DEMONSTRATIONS = "demonstrations"
"""Name of the term of demonstrations, which are added to a step after credit was assigned to its rollouts."""


def cross_entropy(x: TermInputs) -> Tensor:
    """-log π(o_t), [N], at the temperature that the run samples with."""
    return -x.logprobs


def weighted_cross_entropy(x: TermInputs) -> Tensor:
    """-p (1 - p) log p of each token's probability p, [N]; the factor has no gradient.

    CHORD-φ (arXiv 2508.11408): tokens whose probability is near 0 or 1 count little.
    """
    p = x.logprobs.detach().exp()
    return -p * (1 - p) * x.logprobs


def tokens_of_writers(weights: Mapping[str, float]) -> Callable[[TrainBatch], Tensor]:
    """`TokenTerm.tokens` for what `WRITERS` wrote: each token has the weight of its writer, 0 if none is given."""

    def tokens(batch: TrainBatch) -> Tensor:
        if batch.observed is None:
            return torch.zeros(batch.num_tokens, device=batch.lengths.device)
        table = torch.tensor([0.0, *(float(weights.get(writer, 0.0)) for writer in WRITERS)])
        return table.to(batch.observed.device)[batch.observed]

    return tokens
