"""Supervised terms of the loss: cross-entropy on tokens that the policy has not sampled (`covey.core.terms`)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.records import WRITERS
from covey.core.terms import TermInputs

DEMONSTRATIONS = "demonstrations"
"""Name of the term of demonstrations, which join a step after its rollouts have their credit."""


def cross_entropy(x: TermInputs) -> Tensor:
    """-log π(o_t), [N]: at the run's temperature, as the policy is sampled."""
    return -x.logprobs


def weighted_cross_entropy(x: TermInputs) -> Tensor:
    """-p (1 - p) log p of each token's probability p, [N]; the factor has no gradient.

    CHORD-φ (arXiv 2508.11408): tokens that are sure, and those that the policy would never say, count little.
    """
    p = x.logprobs.detach().exp()
    return -p * (1 - p) * x.logprobs


def tokens_of_writers(weights: Mapping[str, float]) -> Callable[[TrainBatch], Tensor]:
    """Tokens of a term: those that some writers of `WRITERS` wrote, each with its writer's weight."""

    def tokens(batch: TrainBatch) -> Tensor:
        if batch.observed is None:
            return torch.zeros(batch.num_tokens, device=batch.lengths.device)
        table = torch.tensor([0.0, *(float(weights.get(writer, 0.0)) for writer in WRITERS)])
        return table.to(batch.observed.device)[batch.observed]

    return tokens
