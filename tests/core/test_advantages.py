"""Credit, by arithmetic one can check by eye."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.advantages import group_relative, leave_one_out, nanstd, normalize_then_sum, weighted_total

NAN = math.nan


def loo(rewards):
    return leave_one_out(rewards)


def loo_normalized(rewards):
    return leave_one_out(rewards, normalize=True)


def by_group(rewards):
    return group_relative(rewards, "group")


def by_batch(rewards):
    return group_relative(rewards, "batch")


def unscaled(rewards):
    return group_relative(rewards, "none")


def two_objectives(rewards):
    return normalize_then_sum(torch.stack([rewards, rewards.square()], -1), torch.tensor([1.0, 0.5]))


ESTIMATORS = [by_group, by_batch, unscaled, loo, loo_normalized, two_objectives]


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


def approx(rows):
    return [pytest.approx(row, abs=1e-6) for row in rows]


# Rewards [[0, 2], [1, 1]]: group means 1 and 1, deviations of n-1: sqrt(2) and 0; batch deviation sqrt(2/3).
SIMPLE = [[0.0, 2.0], [1.0, 1.0]]


def test_group_scaling_divides_by_the_groups_own_deviation():
    a = 1 / (math.sqrt(2) + 1e-4)
    assert by_group(table(SIMPLE)).tolist() == approx([[-a, a], [0, 0]])


def test_batch_scaling_divides_by_the_deviation_of_all_rewards():
    a = 1 / (math.sqrt(2 / 3) + 1e-4)
    assert by_batch(table(SIMPLE)).tolist() == approx([[-a, a], [0, 0]])


def test_no_scaling_only_centres():
    assert unscaled(table(SIMPLE)).tolist() == [[-1, 1], [0, 0]]


def test_leave_one_out_compares_with_the_siblings():
    # siblings' means: (2+6)/2 = 4, (1+6)/2 = 3.5, (1+2)/2 = 1.5
    assert loo(table([[1, 2, 6]])).tolist() == approx([[-3, -1.5, 4.5]])


def test_leave_one_out_normalised_divides_by_the_batch_deviation():
    # advantages [-2, 2, 0, 0]: mean 0, variance 8/3
    a = 2 / (math.sqrt(8 / 3) + 1e-4)
    assert loo_normalized(table(SIMPLE)).tolist() == approx([[-a, a], [0, 0]])


def test_one_right_completion_gets_an_ordinary_advantage():
    # A = 1 - 0 and 0 - 1/3; the deviation of [1, -1/3, -1/3, -1/3] is sqrt((1 + 3/9) / 3) = 2/3
    assert loo_normalized(table([[1, 0, 0, 0]]))[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    # 0.95 seven times has a deviation of 0, whatever its rounding: A = -0.95 / 0.384
    assert loo_normalized(table([[0, *[0.95] * 7]]))[0, 0].item() == pytest.approx(-2.474, abs=1e-3)


def test_normalize_then_sum_gives_each_objective_the_same_say():
    """One reward in hundreds, one in units, opposed in the second group.

    z = ±1/√2 each (up to ε): S = [-√2, √2] where they agree, [0, 0] where they cancel; std of S = sqrt(4/3).
    """
    rewards = torch.stack([table([[0, 200], [0, 200]]), table([[0, 2], [2, 0]])], -1)
    got = normalize_then_sum(rewards, torch.ones(2))
    a = math.sqrt(2) / math.sqrt(4 / 3)
    assert got[0].tolist() == pytest.approx([-a, a], rel=1e-3)
    assert got[1].tolist() == pytest.approx([0, 0], abs=1e-3)


def test_an_abstaining_objective_leaves_the_other_to_judge():
    """Second objective answers for two completions only: z = [-a, 0, a] and [NaN, -b, b], with a ≈ 1, b ≈ 1/√2."""
    rewards = torch.stack([table([[0, 1, 2]]), table([[NAN, 0, 1]])], -1)
    a, b = 1 / (1 + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)
    total = table([[-a, -b, a + b]])
    expected = total / (total.std() + 1e-4)
    assert normalize_then_sum(rewards, torch.ones(2)).tolist() == approx(expected.tolist())


def test_objective_weights_count_before_the_last_normalisation():
    # second objective silent: only the first one's sign is left
    rewards = torch.stack([table([[0, 1]]), table([[1, 0]])], -1)
    assert normalize_then_sum(rewards, torch.tensor([2.0, 1.0])).sign().tolist() == [[-1, 1]]
    assert normalize_then_sum(rewards, torch.tensor([1.0, 2.0])).sign().tolist() == [[1, -1]]


def test_the_total_is_the_weighted_sum_of_those_who_answered():
    rewards = table([[[1, 2], [NAN, 2], [NAN, NAN]]])
    total = weighted_total(rewards, torch.tensor([1.0, 10.0]))
    assert total[0, :2].tolist() == [21, 20]
    assert total[0, 2].isnan()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    rewards=st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=2, max_size=3),
    column=st.integers(0, 4),
)
def test_a_row_of_nan_equals_a_row_that_is_not_there(estimator, rewards, column):
    """Insert a NaN completion into every group: the others' advantages stay as they were, the new one gets 0."""
    plain = table(rewards)
    hole = torch.full((len(rewards), 1), NAN, dtype=torch.float64)
    holed = torch.cat([plain[:, :column], hole, plain[:, column:]], 1)
    got = estimator(holed)
    assert not got[:, column].any()
    kept = torch.cat([got[:, :column], got[:, column + 1 :]], 1)
    torch.testing.assert_close(kept, estimator(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(value=st.floats(-1e3, 1e3), other=st.floats(-10, 10))
def test_a_group_of_equal_rewards_gets_exact_zeros(estimator, value, other):
    """Whatever the rounding of the mean of three 0.1s: the rollout must be recognisable as carrying no signal."""
    rewards = table([[value] * 3, [0.3, other, 0.7], [NAN, value, value]])
    got = estimator(rewards)
    assert got[0].tolist() == [0, 0, 0]
    assert got[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", [by_group, unscaled, loo, loo_normalized])
@given(shifts=st.lists(st.integers(-100, 100), min_size=2, max_size=2))
def test_adding_a_constant_to_a_group_changes_nothing(estimator, shifts):
    rewards = table([[0.0, 1.0, 0.5], [2.0, 0.0, 0.25]])
    shifted = rewards + table([[s] for s in shifts])
    torch.testing.assert_close(estimator(shifted), estimator(rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_of_a_group_sum_to_zero(estimator):
    rewards = table([[0.3, 1.0, NAN, 0.5], [2.0, NAN, 0.0, 0.25]])
    assert estimator(rewards).sum(1).tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_where_nothing_could_be_scored_there_is_no_credit(estimator):
    for rewards in ([[NAN, NAN], [NAN, NAN]], [[NAN, 3.0], [NAN, NAN]], [[5.0]]):
        got = estimator(table(rewards))
        assert not got.any()
        assert got.dtype == torch.float32


def test_deviations_ignore_nan_and_need_two_values():
    # of 1 and 3: sqrt(((1-2)² + (3-2)²) / 1) = sqrt(2)
    got = nanstd(table([[1, NAN, 3], [4, NAN, NAN], [NAN, NAN, NAN]]), dim=1)
    assert got.tolist() == [[pytest.approx(math.sqrt(2))], [0], [0]]


@pytest.mark.parametrize("estimator", ESTIMATORS[:-1])  # the last one squares its rewards
@pytest.mark.parametrize("offset, step", [(1e6, 2.0**-7), (2.0**24, 1.0), (1e9, 10.0), (1e15, 1.0), (-1e9, 10.0)])
def test_a_large_offset_does_not_change_advantages(estimator, offset, step):
    small = table([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 3.0, 1.0]]) * step
    assert estimator(small + offset).tolist() == approx(estimator(small).tolist())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sums_that_differ_by_rounding_are_equal_rewards(estimator):
    assert 0.1 + 0.2 != 0.3
    rewards = table([[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [sum([0.1] * 10), 1.0, 1.0, 1.0]])
    assert estimator(rewards).tolist() == [[0] * 4] * 2
