"""Each token loss and its metrics, one token at a time."""

import math
from dataclasses import replace

import pytest
import torch

from covey.core.losses import (
    SurrogateInputs,
    cispo,
    cispo_stats,
    clip,
    clip_stats,
    gmpo,
    sapo,
    vespo,
    vespo_phi,
    vespo_stats,
)
from covey.core.stats import merge_all

KERNEL = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.3}


def inputs(ratios, advantages, *, lengths=None, sampled=None, rho=None):
    """Tokens with the given ratios: log π = log ratio and log π_old = 0."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return SurrogateInputs(
        log_ratio=log_ratio,
        logprobs=log_ratio,
        old_logprobs=torch.zeros(len(ratios), dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sampled=torch.ones(len(ratios), dtype=torch.bool) if sampled is None else torch.tensor(sampled),
        lengths=torch.tensor(lengths or [1] * len(ratios)),
        mismatch_weights=None if rho is None else torch.tensor(rho, dtype=torch.float64),
    )


def values(stats):
    return {name: stat.value() for name, stat in stats.items()}


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x.log_ratio)[0].tolist()


def test_clip_takes_the_pessimistic_side():
    x = inputs([2.0, 2.0, 0.5, 0.5, 1.1], [1, -1, 1, -1, 1])
    loss = clip(x, **CLIP)
    assert loss.tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8, -1.1])
    assert gradient(loss, x) == pytest.approx([0, 2.0, -0.5, 0, -1.1])


def test_delta_bounds_what_clipping_lets_through():
    x = inputs([5.0, 5.0], [1, -1])
    loss = clip(x, **CLIP, delta=3.0)
    assert loss.tolist() == pytest.approx([-1.3, 3.0])
    assert gradient(loss, x) == [0, 0]


def test_cispo_keeps_every_tokens_gradient_and_caps_its_weight():
    x = inputs([8.0, 8.0, 0.1], [1, -1, 1])
    loss = cispo(x, epsilon_high=5.0)
    log8 = math.log(8)
    assert loss.tolist() == pytest.approx([-5 * log8, 5 * log8, -0.1 * math.log(0.1)])
    assert gradient(loss, x) == pytest.approx([-5, 5, -0.1])


def test_sapo_gates_by_a_sigmoid_with_a_temperature_by_sign():
    x = inputs([1.0, 1.0, 2.0], [1, -1, 1])
    loss = sapo(x, temperature_pos=1.0, temperature_neg=2.0)
    sigmoid1 = 1 / (1 + math.exp(-1))
    assert loss.tolist() == pytest.approx([-4 * 0.5, 2 * 0.5, -4 * sigmoid1])
    # at r = 1 the gate's slope makes the gradient exactly -A, whatever τ
    assert gradient(loss, x)[:2] == pytest.approx([-1, 1])


def test_vespo_weighs_by_the_sequences_ratio():
    # w = 2 · 0.75 = 1.5, φ = e^3 · 1.5² · e^-4.5 ; second sequence punished, w = 0.5: φ = e^2 · 0.5³ · e^-1
    x = inputs([2.0, 0.75, 0.5], [1, 1, -1], lengths=[2, 1])
    good, bad = 1.5**2 * math.exp(-1.5), 0.5**3 * math.exp(1)
    assert vespo_phi(x, **KERNEL).tolist() == pytest.approx([good, good, bad])
    loss = vespo(x, **KERNEL)
    assert gradient(loss, x) == pytest.approx([-good, -good, bad])
    assert values(vespo_stats(x, **KERNEL)) == pytest.approx({"vespo/phi_seq_mean": (good + bad) / 2})


def test_vespo_folds_the_mismatch_into_the_sequence_weight():
    corrected = vespo_phi(inputs([1.0, 1.0], [1, 1], lengths=[2], rho=[2.0, 0.75]), **KERNEL)
    assert corrected.tolist() == pytest.approx([1.5**2 * math.exp(-1.5)] * 2)


def test_vespo_is_one_on_policy_and_finite_at_the_extremes():
    assert vespo_phi(inputs([1.0, 1.0], [1, -1]), **KERNEL).tolist() == pytest.approx([1, 1])
    extreme = inputs([1e30, 1e-30, 1.0], [1, -1, 1], rho=[1.0, 1.0, 0.0])
    phi = vespo_phi(extreme, **KERNEL)
    assert phi.isfinite().all() and (phi >= 0).all()
    assert phi.max() < 1e-6


def test_vespo_gives_zero_advantage_no_loss_and_no_gradient():
    x = inputs([2.0, 0.5], [0.0, -0.0])
    loss = vespo(x, **KERNEL)
    assert loss.abs().tolist() == [0, 0]
    assert [abs(g) for g in gradient(loss, x)] == [0, 0]
    assert vespo_phi(x, **KERNEL).tolist() == pytest.approx(
        [r**2 * math.exp(3 - 3 * r) for r in (2.0, 0.5)]  # the kernel of rewarded sequences
    )


def test_gmpo_is_the_geometric_mean_of_one_sided_clips():
    # A > 0: log-ratios bounded above by 0.4: (0.4 + -1)/2; A < 0: bounded below by -0.4: (1 + -0.4)/2
    ratios = [math.e, 1 / math.e]
    x = inputs(ratios * 2, [1, 1, -1, -1], lengths=[2, 2])
    loss = gmpo(x, epsilon_low=0.4, epsilon_high=0.4)
    good, bad = math.exp(-0.3), math.exp(0.3)
    assert loss.tolist() == pytest.approx([-good, -good, bad, bad])
    # averaged over the two tokens, the loss is the sequence's; a clipped token gets no gradient, the other A·value/2
    assert [g / 2 for g in gradient(loss, x)] == pytest.approx([0, -good / 2, bad / 2, 0])


def test_gmpo_ignores_tokens_that_were_not_sampled():
    x = inputs([2.0, 9.0], [1, 1], lengths=[2], sampled=[True, False])
    assert gmpo(x, epsilon_low=1.0, epsilon_high=1.0)[0].item() == pytest.approx(-2)


def test_clip_fractions_count_only_the_side_that_binds():
    # low binds for A < 0, high for A > 0: tokens 0 and 3; the last one is not trained. Two completions: 0-2 and 3-5.
    sampled = [True, True, True, True, True, False]
    x = inputs([0.5, 0.5, 2.0, 2.0, 1.0, 2.0], [-1, 1, -1, 1, 1, 1], lengths=[3, 3], sampled=sampled)
    assert values(clip_stats(x, low=0.8, high=1.3)) == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 5,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/high_max": 1 / 2,
            "clip_ratio/region_mean": 2 / 5,
        }
    )


def test_clip_fractions_count_each_non_empty_sequence_once():
    # lengths 3, 1, 0 and an untrained one: of two sequences that count, the long one is clipped
    x = inputs(
        [2.0, 2.0, 2.0, 1.0, 2.0],
        [1, 1, 1, 1, 1],
        lengths=[3, 1, 0, 1],
        sampled=[True, False, True, True, False],
    )
    stats = values(clip_stats(x, low=0.8, high=1.3, per_sequence=True))
    assert stats["clip_ratio/high_mean"] == pytest.approx(1 / 2)
    assert stats["clip_ratio/low_mean"] == 0


def test_clip_extremes_are_over_completions_however_cut():
    # Completions of 2, 2 and 1 tokens, of which 1, 2 and 0 fall below the bound.
    ratios, credit = [0.5, 1.0, 0.5, 0.5, 1.0], [-1.0] * 5
    whole = clip_stats(inputs(ratios, credit, lengths=[2, 2, 1]), low=0.8, high=1.3)
    cut = clip_stats(inputs(ratios[:2], credit[:2], lengths=[2]), low=0.8, high=1.3)
    merge_all(cut, clip_stats(inputs(ratios[2:], credit[2:], lengths=[2, 1]), low=0.8, high=1.3))
    assert values(whole) == values(cut)
    assert values(whole)["clip_ratio/low_mean"] == pytest.approx(3 / 5)
    assert values(whole)["clip_ratio/low_min"] == 0
    both = clip_stats(inputs(ratios[:4], credit[:4], lengths=[2, 2]), low=0.8, high=1.3)
    assert values(both)["clip_ratio/low_min"] == pytest.approx(1 / 2)


def test_skipped_completions_are_unclipped_in_the_extremes():
    x = inputs([0.5, 0.5], [-1.0, -1.0], lengths=[2])
    assert values(clip_stats(x, low=0.8, high=1.3))["clip_ratio/low_min"] == 1.0
    skipped = replace(x, skipped_tokens=3, skipped_rows=1)
    assert values(clip_stats(skipped, low=0.8, high=1.3))["clip_ratio/low_min"] == 0.0


def test_no_trained_token_no_clip_fraction():
    stats = clip_stats(inputs([2.0], [1], sampled=[False]), low=0.8, high=1.3)
    assert all(math.isnan(stat.value()) for stat in stats.values())  # and such values are not logged


def test_cispo_clip_ratio_is_the_share_rewarded_beyond_the_cap():
    x = inputs([6.0, 6.0, 1.0, 6.0], [1, -1, 1, 1], sampled=[True, True, True, False])
    assert values(cispo_stats(x, epsilon_high=5.0)) == pytest.approx({"cispo_clip_ratio": 1 / 3})
