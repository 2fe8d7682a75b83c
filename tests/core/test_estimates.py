"""Estimates of evaluation: against counting every subset, and against what they estimate."""

import itertools
import math
import random
import statistics
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.estimates import interval_of_mean, interval_of_share, maj_at_k, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, c in itertools.product(range(1, 7), range(7)):
        if c > n:
            continue
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_does_not_overflow_or_round():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)  # 1 - C(9999, 100) / C(10000, 100) = 100 / 10000
    assert pass_at_k(10_000, 0, 100) == 0.0 and pass_at_k(10_000, 9_950, 100) == 1.0


def brute_force(answers, right, k):
    """The average over all subsets: each of the most frequent answers wins equally often."""
    total = Fraction(0)
    subsets = list(itertools.combinations(range(len(answers)), k))
    share = {
        a: Fraction(sum(r for b, r in zip(answers, right, strict=True) if b == a), answers.count(a)) for a in answers
    }
    for subset in subsets:
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        if best:
            total += sum((share[answer] for answer in best), Fraction(0)) / len(best)
    return float(total / len(subsets))


@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8), st.data()
)
def test_maj_at_k_is_the_average_over_all_subsets(samples, data):
    answers, right = [answer for answer, _ in samples], [one for _, one in samples]
    k = data.draw(st.integers(1, len(samples)))
    assert maj_at_k(answers, right, k) == pytest.approx(brute_force(answers, right, k))


def test_voting_by_eye():
    votes = ["4", "4", "5", None]
    assert maj_at_k(votes, [True, True, False, False], 1) == 0.5  # as many as are right
    assert maj_at_k(votes, [True, True, False, False], 4) == 1.0  # 4 has two votes
    assert maj_at_k([None, None], [False, False], 2) == 0.0  # nobody votes
    assert maj_at_k(["4", "5"], [True, False], 2) == 0.5  # a tie
    assert maj_at_k(["4", "4"], [True, False], 2) == 0.5  # the same answer, once in the wrong format


def test_sixty_four_different_answers_are_counted_at_once():
    answers = [str(i % 20) for i in range(64)]
    assert 0.0 < maj_at_k(answers, [answer == "3" for answer in answers], 32) < 1.0


@pytest.mark.parametrize("k", [0, 5])
def test_k_is_between_one_and_the_samples(k):
    with pytest.raises(ValueError, match="between 1 and the number of samples, 4"):
        pass_at_k(4, 2, k)
    with pytest.raises(ValueError, match="between 1 and the number of samples, 4"):
        maj_at_k(["a"] * 4, [True] * 4, k)


def test_the_estimates_are_unbiased():
    # Answers a (right), b, c with chances .5, .3, .2. Of 3 samples a wins with three or two votes, and by lot where all
    # differ: .5^3 + 3 * .5^2 * .5 + 6 * .5 * .3 * .2 / 3 = .125 + .375 + .06 = .56; pass@3 = 1 - .5^3 = .875.
    rng = random.Random(0)
    votes, passes = [], []
    for _ in range(1500):
        answers = rng.choices("abc", [0.5, 0.3, 0.2], k=6)
        right = [answer == "a" for answer in answers]
        votes.append(maj_at_k(answers, right, 3))
        passes.append(pass_at_k(6, sum(right), 3))
    for values, truth in ((votes, 0.56), (passes, 0.875)):
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert abs(statistics.fmean(values) - truth) < 4 * error


def test_zeros_and_ones_give_wilsons_interval():
    # n = 10, p = .8, z = 2: middle (.8 + 4/20) / (1 + 4/10) = 1/1.4, spread 2/1.4 sqrt(.16/10 + 4/400), a root of .026
    low, high = interval_of_share([1.0] * 8 + [0.0] * 2, z=2.0)
    assert low == pytest.approx((1 - 2 * math.sqrt(0.026)) / 1.4)
    assert high == pytest.approx((1 + 2 * math.sqrt(0.026)) / 1.4)


def test_more_samples_of_a_prompt_narrow_the_interval():
    one = interval_of_share([1.0, 0.0] * 10)
    alike = interval_of_share([0.5] * 20, draws=8)
    counted_alone = interval_of_share([1.0, 0.0] * 80)  # 20 * 8 independent samples
    assert alike == pytest.approx(counted_alone)
    assert one[0] < alike[0] < 0.5 < alike[1] < one[1]


def test_a_single_prompt_and_all_or_nothing_have_wide_intervals():
    assert interval_of_share([1.0])[0] < 0.25 and interval_of_share([0.0])[1] > 0.75
    assert interval_of_share([1.0] * 20)[0] < 0.9


def drawn(rng, shape, prompts, samples):
    """Shares of right samples: prompts have chances of their own."""
    values = []
    for _ in range(prompts):
        chance = {"alike": 0.3, "spread": rng.betavariate(0.5, 0.5), "rare": rng.betavariate(0.5, 9.5)}[shape]
        values.append(sum(rng.random() < chance for _ in range(samples)) / samples)
    return values


TRUTH = {"alike": 0.3, "spread": 0.5, "rare": 0.05}


@pytest.mark.parametrize(("prompts", "samples"), [(20, 1), (20, 8), (100, 1), (100, 4)])
@pytest.mark.parametrize("shape", TRUTH)
def test_intervals_hold_the_truth_as_often_as_they_say(shape, prompts, samples):
    rng = random.Random(1)
    held = []
    for _ in range(400):
        low, high = interval_of_share(drawn(rng, shape, prompts, samples), samples)
        held.append(low <= TRUTH[shape] <= high)
    # 95%, give or take three standard errors of 400 trials (.033) and what few prompts leave unknown
    assert 0.895 <= statistics.fmean(held) <= 0.995


def test_intervals_of_few_prompts_hold_the_chance_of_a_subset():
    # chances evenly spread: of 8 samples one is right in 1 - 1/9; of 16 samples there are two such sets for themselves
    rng, held = random.Random(3), []
    for _ in range(300):
        counts = [sum(rng.random() < chance for _ in range(16)) for chance in (rng.random() for _ in range(5))]
        low, high = interval_of_share([pass_at_k(16, count, 8) for count in counts], 16 // 8)
        held.append(low <= 8 / 9 <= high)
    assert 0.91 <= statistics.fmean(held) <= 0.99


def test_intervals_of_rewards_hold_the_mean():
    rng = random.Random(2)
    held = []
    for _ in range(400):
        low, high = interval_of_mean([rng.gauss(-3.0, 2.0) for _ in range(40)])
        held.append(low <= -3.0 <= high)
    assert 0.91 <= statistics.fmean(held) <= 0.98
