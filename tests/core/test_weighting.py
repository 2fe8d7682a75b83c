"""Each reduction, spelled out as the weights it gives: rollouts of 1, 3, 0 and 2 trained tokens."""

import pytest
import torch

from covey.core.losses import (
    BatchCounts,
    mean_constant_length,
    mean_over_update,
    mean_per_micro_batch,
    mean_per_sequence,
    sum_per_sequence,
    token_weights,
)

# One rank, two nominal micro-batches of two rollouts: 1 + 3 and 0 + 2 trained tokens. One optimizer step.
COUNTS = BatchCounts(
    tokens=torch.tensor([1.0, 3.0, 0.0, 2.0]),
    micro_tokens=torch.tensor([4.0, 4.0, 2.0, 2.0]),
    rows_per_update=4,
    tokens_per_update=6,
    micro_batches_per_update=2,
    max_completion_length=10,
)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (mean_per_sequence, [1 / 4, 1 / 12, 1 / 4, 1 / 8]),  # 1/(4 rows · own tokens)
        (mean_per_micro_batch, [1 / 8, 1 / 8, 1 / 4, 1 / 4]),  # 1/(2 micro-batches · their tokens)
        (mean_constant_length, [1 / 40] * 4),  # 1/(4 rows · 10)
        (mean_over_update, [1 / 6] * 4),
        (sum_per_sequence, [1 / 4] * 4),
    ],
)
def test_weights_of_a_token_by_rollout(weighting, expected):
    assert weighting(COUNTS).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weighting", [mean_per_micro_batch, mean_over_update])
def test_a_mean_over_tokens_has_weights_that_sum_to_one(weighting):
    assert (weighting(COUNTS) * COUNTS.tokens).sum().item() == pytest.approx(1)


def test_the_mean_over_sequences_sums_to_the_non_empty_share():
    assert (mean_per_sequence(COUNTS) * COUNTS.tokens).sum().item() == pytest.approx(3 / 4)


def test_tokens_that_are_not_trained_weigh_nothing():
    sampled = torch.tensor([True, True, False, True])
    weights = token_weights(lambda counts: torch.tensor([2.0, 5.0, 3.0]), COUNTS, sampled, torch.tensor([1, 0, 3]))
    assert weights.tolist() == [2, 3, 0, 3]


def test_a_step_without_tokens_has_finite_weights():
    none = BatchCounts(torch.zeros(1), torch.zeros(1), 1, 0, 1, 10)
    for weighting in (mean_per_sequence, mean_per_micro_batch, mean_constant_length, mean_over_update):
        assert weighting(none).isfinite().all()


def test_updates_with_few_tokens_average_over_all_of_them():
    """One trained token in a rollout batch of two updates: each divides by half a token, so it counts once."""
    counts = BatchCounts(torch.ones(1), torch.ones(1), 1, 0.5, 1, 10)
    assert mean_over_update(counts).tolist() == [2.0]
