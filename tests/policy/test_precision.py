"""Weights in half precision: which of them an update can move."""

import pytest
import torch

from covey.policy.precision import LOOKED_AT, changed, sample, share_that_moves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", [1e-6, 1e-4, 1e-2])
def test_the_share_that_moves_is_that_of_which_a_sum_differs(dtype, update):
    weights = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = torch.minimum((weights + update != weights).float(), (weights - update != weights).float())
    assert share_that_moves([weights], update) == pytest.approx(float(moved.mean()), abs=0.01)


def test_a_number_moves_by_half_the_distance_to_the_next():
    one = [torch.ones(1, dtype=torch.bfloat16)]  # the next is 1 + 2^-7
    assert [share_that_moves(one, update) for update in (2**-8, 2**-9)] == [1.0, 0.0]
    assert share_that_moves([torch.zeros(1, dtype=torch.bfloat16)], 1e-30) == 1.0


def test_a_sample_counts_what_changed():
    weight = torch.arange(3 * LOOKED_AT, dtype=torch.float32)
    other = torch.zeros(2)
    before = sample([weight, other])
    weight[0] += 1
    other += 1
    assert changed(before, [weight, other]) == (1 + 2, LOOKED_AT + 2)
