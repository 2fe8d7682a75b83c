"""Exact parts of claims: figures that can be derived by hand, or that were computed before the claims were written."""

import pytest
from benchmarks.claims import exact


def test_a_mean_per_sequence_alone_changes_the_length_of_wrong_answers():
    """Dr. GRPO's claim (2503.20783), in expectation and without sampling noise."""
    found = {name: exact.lengths_along_the_update(weight) for name, weight in exact.WEIGHTS.items()}
    assert found["per sequence"] == pytest.approx({"wrong": 2.14e-2, "right": -2.14e-2, "accuracy": 5.66e-2}, rel=2e-3)
    assert abs(found["constant"]["wrong"]) < 1e-15 and abs(found["sum"]["wrong"]) < 1e-14
    assert found["constant"]["accuracy"] == pytest.approx(2.53e-2, rel=2e-3)
    assert found["sum"]["accuracy"] == pytest.approx(9 * found["constant"]["accuracy"])  # the constant is 1/9
    assert exact.length_bias().holds


def test_an_unlikely_token_rises_by_the_bound():
    figures = exact.clip_higher().figures
    assert figures["after one batch, 0.2"] == pytest.approx(0.012)
    assert figures["after one batch, 0.28"] == pytest.approx(0.0128)
    assert figures["batches to 10%"] == pytest.approx(1.48, abs=0.01)


def test_groups_with_a_signal_are_those_that_are_not_all_equal():
    assert exact.share_with_signal(0.5, 2) == 0.5
    found = exact.groups_for_a_signal().figures.values()
    assert list(found) == pytest.approx([6.70, 1.76, 1.01, 1.76], abs=5e-3)


def test_rloo_is_grpo_unscaled_times_g_over_g_minus_one():
    found = exact.rloo_identity()
    assert found.holds and found.figures["float64"] < 1e-15


def test_noise_of_small_groups_at_equal_rollouts():
    """For G = 2 and p = .5: the gradient is 1/2 · (1/2 + 1/2) = .5 in half of the groups, else 0: .0625 · 2 = .125."""
    assert exact.gradient_variance(0.5, 2) == pytest.approx(0.125)
    found = list(exact.noise_of_small_groups().figures.values())
    assert found == pytest.approx([0.0738, 0.0630, 0.0599, 0.0587, 0.1250, 0.0417, 0.0179, 0.0083], abs=6e-5)


def test_hard_prompts_weigh_more_by_the_groups_deviation():
    assert exact.mean_size_of_advantage(0.5, 2, "none") == pytest.approx(0.25)  # .5 in half of the groups
    found = exact.weight_of_hard_prompts()
    assert list(found.figures.values()) == pytest.approx([0.25, 0.19, 0.32, 0.19], abs=5e-3)
    assert found.holds


@pytest.mark.parametrize(
    ("drift", "kl", "none", "token"),
    [(0.1, 0.009, 0.078, 0.056), (0.3, 0.082, 0.239, 0.180), (1.0, 0.776, 0.790, 0.713)],
)
def test_ratios_of_tokens_repair_a_part_of_the_gradient_and_their_product_all(drift, kl, none, token):
    found = exact.corrections(drift)
    assert (found["KL"], found["none"], found["token"]) == pytest.approx((kl, none, token), abs=6e-4)
    assert found["sequence"] < 1e-14


def test_gradients_of_kl_estimators_are_those_of_the_divergences():
    found = exact.kl_gradients()
    assert found.holds
    assert found.figures["cosine of k3 with reverse"] == pytest.approx(0.911, abs=6e-4)
    assert max(value for name, value in found.figures.items() if not name.startswith("cosine")) < 1e-14


def test_bf16_keeps_weights_that_are_512_steps_large():
    found = exact.smallest_bf16_change()
    assert found.holds and found.figures["largest weight that changes"] == pytest.approx(4.88e-4, rel=0.01)


def test_a_baseline_by_role_changes_the_variance_alone():
    found = exact.role_baselines()
    assert found.holds
    assert list(found.figures.values())[1:] == pytest.approx([0.40, 0.08], abs=5e-3)


def test_gdpo_tells_rewards_of_equal_sum_apart():
    found = exact.distinct_advantages()
    assert found.holds
    # of 4 kinds two have sum 1: the sums 0 and 2 are missing in (3/4)^4 of the groups each, 1 in (1/2)^4
    assert found.figures["sum"] == pytest.approx(3 - 2 * 0.75**4 - 0.5**4)


def test_maxrl_weighs_prompts_by_the_inverse_of_their_pass_rate():
    found = exact.weight_by_pass_rate()
    assert found.holds and found.figures["0.5"] == pytest.approx(2.0, rel=1e-6)
