"""Averages of token losses, as one weight per token.

A weighting is computed once per rollout batch, before the tokens are cut into micro-batches, from counts over the whole
optimizer step and all ranks. The loss is then `sum(weights * token_loss)`, independent of the cut. All weightings are
constant over a rollout, so they return one value per rollout, `[B]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.core.ragged import expand


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts that a weighting may divide by.

    Attributes:
        tokens: [B] float, the trained tokens of each rollout.
        micro_tokens: [B] float, the trained tokens of the nominal micro-batch the rollout belongs to
            (`per_device_train_batch_size` rollouts of one rank, in sampling order).
        rows_per_update: rollouts of one optimizer step, over all ranks.
        tokens_per_update: trained tokens of one optimizer step, over all ranks: an equal share of the rollout
            batch's tokens, so that every step on it divides by the same number.
        micro_batches_per_update: nominal micro-batches of one optimizer step, over all ranks.
        max_completion_length: tokens a completion may have.
    """

    tokens: Tensor
    micro_tokens: Tensor
    rows_per_update: float
    tokens_per_update: float
    micro_batches_per_update: float
    max_completion_length: int | None


Weighting = Callable[[BatchCounts], Tensor]


def mean_per_sequence(counts: BatchCounts) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t: the sample-level mean of GRPO (arXiv 2402.03300, eq. 3)."""
    return 1.0 / (counts.tokens.clamp(min=1.0) * counts.rows_per_update)


def mean_per_micro_batch(counts: BatchCounts) -> Tensor:
    """The token mean of each nominal micro-batch, averaged over micro-batches: `loss_type="bnpo"`.

    The Beta-distributed reward normalisation of the paper of that name (BNPO, arXiv 2506.02864) is not part of it.
    """
    return 1.0 / (counts.micro_tokens.clamp(min=1.0) * counts.micro_batches_per_update)


def mean_constant_length(counts: BatchCounts) -> Tensor:
    """1/(B · L_max) Σ_i Σ_t: no length bias (Dr. GRPO, arXiv 2503.20783, §3.2)."""
    assert counts.max_completion_length, "checked with the config"
    return torch.full_like(counts.tokens, 1.0 / (counts.rows_per_update * counts.max_completion_length))


def mean_over_update(counts: BatchCounts) -> Tensor:
    """1/Σ|o_i| Σ_i Σ_t: the token-level mean of DAPO (arXiv 2503.14476, eq. 12), over the whole optimizer step."""
    return torch.full_like(counts.tokens, 1.0 / (counts.tokens_per_update or 1.0))


def sum_per_sequence(counts: BatchCounts) -> Tensor:
    """1/B Σ_i Σ_t: every token counts fully (LUSPO, arXiv 2602.05261: a sequence's loss times its length)."""
    return torch.full_like(counts.tokens, 1.0 / counts.rows_per_update)


def token_weights(weighting: Weighting, counts: BatchCounts, sampled: Tensor, lengths: Tensor) -> Tensor:
    """Weights [N]: the rollout's value where a token is trained, 0 elsewhere."""
    return torch.where(sampled, expand(weighting(counts), lengths), 0.0)
