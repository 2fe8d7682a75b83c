"""Importance ratios at every level, the off-policy filter and the engine/trainer correction, by eye."""

import math
from functools import partial

import pytest
import torch

from covey.core.losses import RATIO_LEVELS
from covey.core.mismatch import mismatch_weights, off_policy_keep, rejecting
from covey.core.stats import merge_all

# Two sequences of 3 and 1 tokens; the second token of the first came from a tool.
LENGTHS = torch.tensor([3, 1])
SAMPLED = torch.tensor([True, False, True, True])
OLD = torch.zeros(4, dtype=torch.float64)


def levels(name, logprobs):
    return RATIO_LEVELS[name](logprobs, OLD, SAMPLED, LENGTHS)


@pytest.mark.parametrize(
    ("level", "expected", "gradient"),
    [
        # log-ratios 1, 9 (tool), 3 and 5; the gradient is that of the sum over the trained tokens
        ("token", [1, 9, 3, 5], [1, 0, 1, 1]),
        ("sequence", [2, 2, 2, 5], [1, 0, 1, 1]),  # mean of 1 and 3; each of 2 tokens carries half of both
        ("sequence_token", [2, 2, 2, 5], [1, 0, 1, 1]),
        ("sequence_sum", [4, 4, 4, 5], [2, 0, 2, 1]),
    ],
)
def test_log_ratios_of_each_level(level, expected, gradient):
    logprobs = torch.tensor([1.0, 9.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    log_ratio = levels(level, logprobs)
    assert log_ratio.tolist() == expected
    log_ratio[SAMPLED].sum().backward()
    assert logprobs.grad.tolist() == gradient


def test_sequence_level_shares_the_gradient_sequence_token_not():
    logprobs = torch.tensor([1.0, 9.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    shared = torch.autograd.grad(levels("sequence", logprobs)[0], logprobs)[0]
    own = torch.autograd.grad(levels("sequence_token", logprobs)[0], logprobs)[0]
    assert shared.tolist() == [0.5, 0, 0.5, 0]
    assert own.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("level", ["sequence", "sequence_sum"])
def test_a_sequence_without_trained_tokens_has_ratio_one(level):
    untrained, lengths = torch.tensor([False, True]), torch.tensor([1, 1])
    log_ratio = RATIO_LEVELS[level](torch.ones(2), torch.zeros(2), untrained, lengths)
    assert log_ratio.tolist() == [0, 1]


def test_only_punished_sequences_that_drifted_are_dropped():
    # mean drift of the trained tokens: (0.2 + 0.4) / 2 = 0.3 in each; the tool's 9 does not count
    behaviour = torch.tensor([0.2, 9.0, 0.4] * 2)
    sampled, lengths = torch.tensor([True, False, True] * 2), torch.tensor([3, 3])
    advantages = torch.tensor([-1.0] * 3 + [1.0] * 3)

    def keep(threshold):
        return off_policy_keep(advantages, torch.zeros(6), behaviour, sampled, lengths, threshold).tolist()

    assert keep(0.29) == [False] * 3 + [True] * 3
    assert keep(0.31) == [True] * 6


def test_a_zero_advantage_is_kept_and_nan_counts_as_no_drift():
    keep = off_policy_keep(
        torch.tensor([0.0, -1.0]),
        torch.tensor([-9.0, -9.0]),
        torch.tensor([0.0, math.nan]),
        torch.tensor([True, True]),
        torch.tensor([1, 1]),
        0.1,
    )
    assert keep.tolist() == [True, True]


def test_more_probable_than_when_sampled_is_no_drift():
    """The filter is one-sided: only tokens that became less probable count as drift."""
    minus, one = torch.tensor([-1.0]), torch.tensor([1])
    assert off_policy_keep(minus, torch.tensor([-1.0]), torch.tensor([-5.0]), one.bool(), one, 0.1).tolist() == [True]


def rho(mode, clip_min=None, clip_max=None):
    """Trainer/engine ratios 2, (tool), 4 | 0.25 | and an empty sequence."""
    engine = -torch.tensor([2.0, 7.0, 4.0, 0.25], dtype=torch.float64).log()
    return mismatch_weights(
        OLD, engine, SAMPLED, torch.tensor([3, 1, 0]), mode=mode, clip_min=clip_min, clip_max=clip_max
    )


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "expected"),
    [
        ("token_truncate", None, None, [2, 1, 4, 0.25]),
        ("token_truncate", 0.5, 3.0, [2, 1, 3, 0.5]),
        ("token_mask", None, 3.0, [2, 1, 0, 0.25]),
        ("token_mask", 0.5, 3.0, [2, 1, 0, 0]),
        ("sequence_truncate", None, 3.0, [3, 3, 3, 0.25]),  # 2 · 4 = 8 -> 3
        ("sequence_truncate", 0.5, 9.0, [8, 8, 8, 0.5]),
        ("sequence_mask", None, 3.0, [0, 0, 0, 0.25]),
        ("sequence_mask", 0.5, 9.0, [8, 8, 8, 0]),
    ],
)
def test_mismatch_weights_of_each_mode(mode, clip_min, clip_max, expected):
    assert rho(mode, clip_min, clip_max)[0].tolist() == pytest.approx(expected)


def test_mismatch_metrics_by_token():
    # |log| of the trained tokens: log 2, log 4 = 2 log 2, |log 0.25| = 2 log 2
    stats = {name: stat.value() for name, stat in rho("token_truncate", None, 3.0)[1].items()}
    log2 = math.log(2)
    assert stats == {
        "sampling/sampling_logp_difference/mean": pytest.approx(5 * log2 / 3),
        "sampling/sampling_logp_difference/max": pytest.approx(2 * log2),
        "sampling/importance_sampling_ratio/min": pytest.approx(0.25),
        "sampling/importance_sampling_ratio/mean": pytest.approx((2 + 3 + 0.25) / 3),
        "sampling/importance_sampling_ratio/max": pytest.approx(3),
        "sampling/importance_sampling_ratio/outside": pytest.approx(1 / 3),
    }


def test_mismatch_metrics_count_a_sequence_once():
    stats = rho("sequence_truncate", None, 9.0)[1]
    assert stats["sampling/importance_sampling_ratio/mean"].value() == pytest.approx((8 + 0.25) / 2)
    assert stats["sampling/sampling_logp_difference/mean"].value() == pytest.approx(5 * math.log(2) / 3)


@pytest.mark.parametrize(
    ("mode", "outside"),
    [("token_truncate", 1 / 3), ("token_mask", 1 / 3), ("sequence_truncate", 1 / 2), ("sequence_mask", 1 / 2)],
)
def test_the_share_outside_the_bounds_counts_tokens_or_sequences(mode, outside):
    # tokens 2, 4 and 0.25 against 3: one of three; sequences 8 and 0.25: one of two
    stats = rho(mode, None, 3.0)[1]
    assert stats["sampling/importance_sampling_ratio/outside"].value() == pytest.approx(outside)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_numbers_that_are_none_do_not_spread(mode):
    """NaN and what the engine calls impossible agree; what the trainer calls impossible weighs nothing."""
    one = torch.tensor([1, 1, 1, 1])
    weights, stats = mismatch_weights(
        torch.tensor([-1.0, -1.0, -math.inf, -1.0]),
        torch.tensor([math.nan, -math.inf, -1.0, -1e4]),
        one.bool(),
        one,
        mode=mode,
        clip_min=None,
        clip_max=None,
    )
    assert weights[:2].tolist() == [1, 1]
    assert 0 <= weights[2] < 1e-30
    assert 1e30 < weights[3] < math.inf
    assert all(math.isfinite(stat.value()) for stat in stats.values())


def test_mismatch_metrics_of_parts_merge_to_those_of_the_whole():
    old, engine = torch.zeros(5), torch.linspace(-1, 1, 5)

    def stats(part, lengths):
        sampled = torch.ones(len(old[part]), dtype=torch.bool)
        kwargs = {"mode": "sequence_truncate", "clip_min": 0.2, "clip_max": 3.0}
        return mismatch_weights(old[part], engine[part], sampled, torch.tensor(lengths), **kwargs)[1]

    merged = merge_all(stats(slice(0, 3), [1, 2]), stats(slice(3, 5), [2]))
    whole = stats(slice(0, 5), [1, 2, 2])
    assert {n: s.value() for n, s in merged.items()} == pytest.approx({n: s.value() for n, s in whole.items()})


def test_without_a_trained_token_there_are_no_mismatch_metrics():
    none = torch.zeros(1, dtype=torch.bool)
    weights, stats = mismatch_weights(
        OLD[:1], OLD[:1] - 1, none, torch.tensor([1]), mode="sequence_mask", clip_min=None, clip_max=3.0
    )
    assert weights.tolist() == [1]
    assert all(math.isnan(stat.value()) for stat in stats.values())  # and such values are not logged


def kept(low, high, weigh=None):
    """Ratios 2, (tool), 4 | 0.25 | and an empty sequence, rejected by their geometric means √8 and 0.25."""
    engine = -torch.tensor([2.0, 7.0, 4.0, 0.25], dtype=torch.float64).log()
    return rejecting(weigh, low, high)(OLD, engine, SAMPLED, torch.tensor([3, 1, 0]))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (None, None, [1, 1, 1, 1]),
        (None, 2.9, [1, 1, 1, 1]),  # √8 = 2.83: the product, 8, or a ratio of 4 would be above
        (None, 2.8, [0, 0, 0, 1]),
        (0.25, None, [1, 1, 1, 1]),
        (0.26, None, [1, 1, 1, 0]),
        (0.5, 2.0, [0, 0, 0, 0]),
    ],
)
def test_completions_are_rejected_by_the_geometric_mean_of_their_ratios(low, high, expected):
    assert kept(low, high)[0].tolist() == expected


def test_those_that_stay_have_the_weights_of_the_mode():
    weigh = partial(mismatch_weights, mode="token_truncate", clip_min=0.5, clip_max=3.0)
    weights, stats = kept(None, 2.9, weigh)
    assert weights.tolist() == pytest.approx([2, 1, 3, 0.5])
    assert stats["sampling/importance_sampling_ratio/max"].value() == pytest.approx(3)
    assert kept(0.26, None, weigh)[0].tolist() == pytest.approx([2, 1, 3, 0])


def test_the_metrics_of_rejection_count_completions():
    stats = {name: stat.value() for name, stat in kept(0.26, None)[1].items()}
    assert stats == {
        "sampling/geometric_ratio/min": pytest.approx(0.25),
        "sampling/geometric_ratio/mean": pytest.approx((math.sqrt(8) + 0.25) / 2),
        "sampling/geometric_ratio/max": pytest.approx(math.sqrt(8)),
        "sampling/geometric_ratio/outside": pytest.approx(1 / 2),  # the empty one has no ratio
    }


def test_the_bound_of_a_geometric_mean_is_the_same_at_every_length():
    """Each token 0.5% more probable: 1.005 at any length, while the product of 2,000 is above 20,000."""
    lengths = torch.tensor([1, 10, 2000])
    old = torch.full((2011,), 0.005, dtype=torch.float64)
    weights, stats = rejecting(None, 0.99, 1.01)(old, torch.zeros_like(old), torch.ones_like(old).bool(), lengths)
    assert weights.eq(1).all() and stats["sampling/geometric_ratio/max"].value() == pytest.approx(math.exp(0.005))


def test_rejection_takes_a_missing_log_prob_for_no_difference():
    one, nothing = torch.tensor([2]), torch.tensor([math.nan, -1.0])
    assert rejecting(None, 0.9, 1.1)(torch.tensor([-5.0, -1.0]), nothing, one.repeat(2).bool(), one)[0].eq(1).all()
