"""Published advantages against loops in float64, and functions that users register."""

import math
from itertools import combinations
from statistics import mean, stdev

import pytest
import torch

from covey.algorithms import ADVANTAGES, grpo, register_advantages, rloo
from covey.algorithms.algorithm import Members
from covey.core.advantages import EPSILON
from tests.algorithms.test_algorithms import config, rloo_config

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
LENGTHS = [[3, 5, 2, 9], [1, 1, 4, 7], [2, 2, 2, 2], [6, 5, 4, 3]]
BATCH = [reward for group in REWARDS for reward in group]


def advantages_of(name, rewards=REWARDS, kl=None, method=grpo, **changes):
    settings = (config if method is grpo else rloo_config)(advantages=name, **changes)
    rewards_PGF = torch.tensor(rewards)[..., None]
    lengths = torch.tensor(LENGTHS)[: len(rewards)]
    members = Members(lengths, torch.zeros_like(lengths), torch.zeros_like(lengths))
    return method.algorithm(settings).advantages(rewards_PGF, torch.ones(1), kl, members)


def close(got, expected):
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_reinforce_plus_plus_compares_with_the_batch():
    expected = [[(r - mean(BATCH)) / (stdev(BATCH) + EPSILON) for r in group] for group in REWARDS]
    close(advantages_of("reinforce_plus_plus"), expected)
    close(advantages_of("reinforce_plus_plus", method=rloo), expected)


def test_reinforce_plus_plus_baseline_divides_by_the_batch():
    centred = [[r - mean(group) for r in group] for group in REWARDS]
    spread = stdev([value for group in centred for value in group]) + EPSILON
    close(advantages_of("reinforce_plus_plus_baseline"), [[value / spread for value in group] for group in centred])


def test_maxrl_divides_by_the_rate_of_success():
    expected = [[(r - mean(g)) / mean(g) if mean(g) else 0.0 for r in g] for g in REWARDS]
    assert expected[1] == [-1, -1, -1, 3]
    close(advantages_of("maxrl"), expected)


def test_gpg_scales_by_the_groups_that_tell_something():
    """Two of four groups have equal rewards: the others count 4 / (4 - 2) times."""
    close(advantages_of("gpg"), [[2 * (r - mean(g)) for r in g] for g in REWARDS])


def test_opo_weighs_the_baseline_by_length():
    """Lengths 3, 5, 2, 9 and rewards 1, 0, 0, 1: the baseline is 12/19."""
    baselines = [
        sum(n * r for n, r in zip(*pair, strict=True)) / sum(pair[0]) for pair in zip(LENGTHS, REWARDS, strict=True)
    ]
    assert baselines[0] == 12 / 19
    close(advantages_of("opo"), [[r - b for r in g] for g, b in zip(REWARDS, baselines, strict=True)])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_averages_over_all_subsets(k):
    """A completion's advantage is the mean, over subsets of k with it, of the standardised best reward."""
    expected = []
    for group in REWARDS:
        best = [max(group[i] for i in subset) for subset in combinations(range(4), k)]
        centre, spread = mean(best), math.sqrt(mean(best) * (1 - mean(best)))
        expected.append(
            [
                mean(
                    (max(group[j] for j in subset) - centre) / spread
                    for subset in combinations(range(4), k)
                    if i in subset
                )
                if spread
                else 0.0
                for i in range(4)
            ]
        )
    close(advantages_of("pass_at_k", pass_at_k=k), expected)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_completions_without_a_reward_play_no_part(name):
    """The group's third completion abstains: the others get what they get in a group of three, and it gets 0."""
    with_gap = advantages_of(name, [[1.0, 0.0, math.nan, 1.0]])
    members = Members(torch.tensor([[3, 5, 9]]), torch.zeros(1, 3), torch.zeros(1, 3))
    settings = config(advantages=name)
    without = grpo.algorithm(settings).advantages(torch.tensor([[[1.0], [0.0], [1.0]]]), torch.ones(1), None, members)
    assert with_gap[0, 2] == 0
    assert torch.allclose(with_gap[0, [0, 1, 3]], without[0])


def test_kl_in_reward_is_subtracted_before_the_baseline():
    """Rewards 2, 1, 0 less 0.5 times KL 0, 2, 4 are 2, 0, -2: their mean is 0."""
    settings = config(kl_in_reward=True, beta=0.5, scale_rewards="none")
    method = grpo.algorithm(settings)
    rewards, kl = torch.tensor([[2.0, 1.0, 0.0]])[..., None], torch.tensor([[0.0, 2.0, 4.0]])
    assert method.advantages(rewards, torch.ones(1), kl).tolist() == [[2, 0, -2]]
    assert method.kl_in_reward
    assert method.objective.beta == 0  # not in the loss as well


def test_registered_advantages_see_rewards_and_lengths():
    seen = []

    def shortest(x):
        seen.append(x)
        return -(x.lengths - x.lengths.mean(1, keepdim=True))

    register_advantages("shortest", shortest)
    try:
        close(advantages_of("shortest", REWARDS[:1]), [[1.75, -0.25, 2.75, -4.25]])
        assert seen[0].rewards.shape == (1, 4, 1)
        with pytest.raises(ValueError, match="already registered"):
            register_advantages("shortest", lambda x: x.totals)
    finally:
        ADVANTAGES.pop("shortest")


def test_advantages_of_another_shape_are_refused():
    register_advantages("flat", lambda x: x.totals.flatten())
    try:
        with pytest.raises(ValueError, match=r"'flat' returned shape \[4\]"):
            advantages_of("flat", REWARDS[:1])
    finally:
        ADVANTAGES.pop("flat")
