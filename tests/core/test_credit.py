"""Credit of steps and turns: by arithmetic, by invariance, and against loops that follow the papers."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.advantages import EPSILON, group_relative, leave_one_out, spread
from covey.core.credit import (
    CreditMix,
    gather_steps,
    optimal_token_baseline,
    steps_leave_one_out,
    steps_relative,
    token_advantages,
)

NAN = math.nan


def longs(values):
    return torch.tensor(values, dtype=torch.long)


# --- gathering ---------------------------------------------------------------------------------------------------


def test_steps_are_ordered_by_completion_and_end_and_numbered():
    steps = gather_steps([[(7, 0.5), (3, 1)], [], [(2, None), (2, True), (0, 2.0)]], [8, 0, 3])
    assert steps.rows.tolist() == [0, 0, 2, 2, 2]
    assert steps.ends.tolist() == [3, 7, 0, 2, 2]
    assert steps.numbers.tolist() == [0, 1, 0, 1, 1]  # the two that end at token 2 are one step, judged twice
    assert steps.rewards[[0, 1, 2, 4]].tolist() == [1, 0.5, 2, 1]
    assert steps.rewards[3].isnan()


@pytest.mark.parametrize("end", [-1, 4, 10**9])
def test_an_end_outside_its_completion_is_refused(end):
    with pytest.raises(ValueError, match=rf"completion 1 ends at token {end}, but the completion has 4 tokens"):
        gather_steps([[(9, 1.0)], [(end, 1.0)]], [10, 4])


def test_an_empty_completion_has_no_steps():
    with pytest.raises(ValueError, match="has 0 tokens"):
        gather_steps([[(0, 1.0)]], [0])


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused(reward):
    with pytest.raises(ValueError, match="finite number, or None to abstain"):
        gather_steps([[(0, reward)]], [1])


# --- by eye ------------------------------------------------------------------------------------------------------


def test_process_supervision_normalises_over_all_steps():
    """Rewards 1, 0 of one completion and 0.5 of the other: mean 0.5, deviation sqrt(0.5 / 2) = 0.5."""
    steps = gather_steps([[(1, 1.0), (2, 0.0)], [(1, 0.5)]], [4, 2])
    a = 0.5 / (0.5 + EPSILON)
    got = steps_relative(steps, longs([0, 0]))
    assert got.tolist() == pytest.approx([a, -a, 0])
    # tokens 0-1 of the first completion: a - a = 0; token 2: -a; token 3 lies after the last step
    assert token_advantages(steps, got, longs([4, 2])).tolist() == pytest.approx([0, 0, -a, 0, 0, 0])


def test_turns_are_compared_with_the_same_turn_of_the_siblings():
    """First turns 1 and 3, second turns 10 and 10: only the first ones differ."""
    steps = gather_steps([[(0, 1.0), (1, 10.0)], [(0, 3.0), (1, 10.0)]], [2, 2])
    got = steps_relative(steps, longs([0, 0]), scale="none", compared_with="turn")
    assert got.tolist() == [-1, 0, 1, 0]
    # over the group, mean 6
    assert steps_relative(steps, longs([0, 0]), scale="none").tolist() == [-5, 4, -3, 4]


def test_mt_grpo_gives_the_first_turn_two_credits():
    """Two turns, of which the first is rewarded: A_1 = A^T + λ A^O and A_2 = A^O (arXiv 2505.11821)."""
    lengths, groups = longs([3, 2]), longs([0, 0])
    steps = gather_steps([[(1, 1.0)], [(0, 0.0)]], lengths.tolist())
    turn = steps_relative(steps, groups, compared_with="turn")
    outcome = group_relative(torch.tensor([[0.0, 4.0]]))[0]
    t, o = turn.tolist(), outcome.tolist()
    got = token_advantages(steps, turn, lengths, outcome, CreditMix(discount=0.3))
    expected = [t[0] + 0.3 * o[0], t[0] + 0.3 * o[0], o[0], t[1] + 0.3 * o[1], o[1]]
    assert got.tolist() == pytest.approx(expected)


def test_the_baseline_of_rloo_leaves_out_the_whole_completion():
    # completion 0: its siblings' steps are 4 and 6, mean 5; the others: (1+3+6)/3 and (1+3+4)/3
    steps = gather_steps([[(0, 1.0), (1, 3.0)], [(0, 4.0)], [(0, 6.0)]], [2, 1, 1])
    got = steps_leave_one_out(steps, longs([0, 0, 0]))
    assert got.tolist() == pytest.approx([-4, -2, 4 - 10 / 3, 6 - 8 / 3])


def test_the_discount_counts_steps_not_tokens():
    # steps end at 2, 3 and 9 with advantages 8, 4, 2 and γ = 1/2: G = 8 + 4/2 + 2/4, 4 + 2/2, 2
    steps = gather_steps([[(2, 0), (3, 0), (9, 0)]], [10])
    got = token_advantages(steps, torch.tensor([8.0, 4.0, 2.0]), longs([10]), mix=CreditMix(discount=0.5))
    assert got.tolist() == [10.5] * 3 + [5.0] + [2.0] * 6


def test_with_discount_0_a_step_answers_for_itself_alone():
    steps = gather_steps([[(0, 0), (1, 0)]], [3])
    got = token_advantages(steps, torch.tensor([1.0, 2.0]), longs([3]), torch.tensor([7.0]), CreditMix(discount=0.0))
    assert got.tolist() == [1, 2, 7]


def test_outcome_and_process_are_mixed_by_their_weights():
    steps = gather_steps([[(1, 0)], []], [3, 1])
    got = token_advantages(steps, torch.tensor([2.0]), longs([3, 1]), torch.tensor([1.0, -1.0]), CreditMix(0.5, 10))
    assert got.tolist() == [11, 11, 10, -10]


# --- edges -------------------------------------------------------------------------------------------------------

BASELINES = [
    lambda steps, groups, how: steps_relative(steps, groups, "group", how),
    lambda steps, groups, how: steps_relative(steps, groups, "batch", how),
    lambda steps, groups, how: steps_relative(steps, groups, "none", how),
    lambda steps, groups, how: steps_leave_one_out(steps, groups, False, how),
    lambda steps, groups, how: steps_leave_one_out(steps, groups, True, how),
]
each_baseline = pytest.mark.parametrize("baseline", BASELINES)
each_comparison = pytest.mark.parametrize("how", ["group", "turn"])


@each_baseline
@each_comparison
def test_without_steps_there_is_no_credit(baseline, how):
    steps = gather_steps([[], []], [2, 0])
    advantages = baseline(steps, longs([0, 0]), how)
    assert advantages.tolist() == []
    assert token_advantages(steps, advantages, longs([2, 0])).tolist() == [0, 0]
    assert token_advantages(steps, advantages, longs([2, 0]), torch.tensor([3.0, 5.0])).tolist() == [3, 3]


@each_baseline
@each_comparison
def test_one_step_alone_has_nothing_to_be_compared_with(baseline, how):
    assert baseline(gather_steps([[(0, 5.0)], []], [1, 1]), longs([0, 0]), how).tolist() == [0]


@each_baseline
@each_comparison
def test_steps_of_equal_reward_get_exact_zeros(baseline, how):
    """Whatever the rounding of the mean of five 0.1s; the other group keeps the batch's deviation above 0."""
    same = [[(0, 0.1), (1, 0.1), (2, 0.1)], [(1, 0.1), (2, 0.1)], [(1, NAN)]]
    steps = gather_steps([*same, [(0, 1.0)], [(0, 2.0)]], [3] * 5)
    got = baseline(steps, longs([0, 0, 0, 1, 1]), how)
    assert got[:6].tolist() == [0] * 6
    assert got[6:].all()
    assert not token_advantages(steps, got, longs([3] * 5))[:9].any()


@each_baseline
def test_one_step_at_the_last_token_is_outcome_supervision(baseline):
    """Steps at the end alone are completions' rewards, so credit is what `core.advantages` computes."""
    rewards = [[0.0, 1.0, 3.0], [2.0, 2.5, NAN]]
    flat = [reward for row in rewards for reward in row]
    steps = gather_steps([[(1, reward)] for reward in flat], [2] * 6)
    whole = {
        0: lambda r: group_relative(r, "group"),
        1: lambda r: group_relative(r, "batch"),
        2: lambda r: group_relative(r, "none"),
        3: leave_one_out,
        4: lambda r: leave_one_out(r, normalize=True),
    }[BASELINES.index(baseline)](torch.tensor(rewards))
    got = token_advantages(steps, baseline(steps, longs([0, 0, 0, 1, 1, 1]), "group"), longs([2] * 6))
    torch.testing.assert_close(got, whole.flatten().repeat_interleave(2), rtol=1e-6, atol=1e-7)


@each_baseline
@each_comparison
def test_an_abstention_changes_no_other_step_and_earns_nothing(baseline, how):
    """The abstaining steps come last in their completions, so no other step's number changes either."""
    plain = [[(0, 1.0)], [(0, 2.0), (1, 5.0)], [(2, 0.5)]]
    groups = longs([0, 0, 0])
    expected = baseline(gather_steps(plain, [4] * 3), groups, how)
    steps = gather_steps([[*pairs, (3, NAN)] for pairs in plain], [4] * 3)
    got = baseline(steps, groups, how)
    silent = steps.rewards.isnan()
    torch.testing.assert_close(got[~silent], expected)
    assert not got[silent].any()


def test_an_abstaining_step_still_takes_a_step():
    # G of token 0 = 0 (abstained) + γ · 4
    steps = gather_steps([[(0, NAN), (1, 1.0)]], [2])
    assert token_advantages(steps, torch.tensor([0.0, 4.0]), longs([2]), mix=CreditMix(discount=0.5)).tolist() == [2, 4]


def test_steps_ending_in_a_tool_result_credit_what_was_sampled():
    """Tokens 0-1 sampled, 2-4 a tool's, 5 sampled; the step ends in the middle of the result."""
    steps = gather_steps([[(3, 0.0)]], [6])
    got = token_advantages(steps, torch.tensor([1.0]), longs([6]))
    assert got.tolist() == [1, 1, 1, 1, 0, 0]


def test_steps_of_two_functions_can_be_concatenated():
    lengths = longs([4, 2])
    one, two = gather_steps([[(1, 0)], [(0, 0)]], [4, 2]), gather_steps([[(3, 0), (1, 0)], []], [4, 2])
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    both = type(one)(*(torch.cat(pair) for pair in zip(one, two, strict=True)))
    got = token_advantages(both, torch.cat([a, b]), lengths)
    torch.testing.assert_close(got, token_advantages(one, a, lengths) + token_advantages(two, b, lengths))


# --- against loops -----------------------------------------------------------------------------------------------


def brute_force(steps, lengths, groups, outcome, *, baseline, compared_with, discount, weights):
    """One completion, one token, one step at a time; `steps` without duplicate ends within a completion."""
    ordered = [sorted(pairs) for pairs in steps]

    def rewards(keep):
        return [
            r
            for i, pairs in enumerate(ordered)
            for number, (_, r) in enumerate(pairs)
            if not math.isnan(r) and keep(i, number)
        ]

    def deviation(values):
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def step_advantage(i, number):
        reward = ordered[i][number][1]
        if math.isnan(reward):
            return 0.0

        def compared(j, m):
            return groups[j] == groups[i] and (compared_with == "group" or m == number)

        if baseline == "loo":
            others = rewards(lambda j, m: compared(j, m) and j != i)
            return reward - statistics.fmean(others) if others else 0.0
        siblings = rewards(compared)
        scale = {"group": deviation(siblings), "batch": deviation(rewards(lambda j, m: True)), "none": 1 - EPSILON}
        return (reward - statistics.fmean(siblings)) / (scale[baseline] + EPSILON)

    out = []
    for i, length in enumerate(lengths):
        for t in range(length):
            total = 0.0
            ends = sorted({end for end, _ in ordered[i]} | ({length - 1} if outcome else set()))
            for number, (end, _) in enumerate(ordered[i]):
                if end >= t:
                    between = sum(t <= e < end for e in ends)
                    total += weights[0] * discount**between * step_advantage(i, number)
            if outcome:
                total += weights[1] * discount ** sum(t <= e < length - 1 for e in ends) * outcome[i]
            out.append(total)
    return out


@st.composite
def batches(draw):
    count = draw(st.integers(1, 5))
    lengths = [draw(st.integers(0, 6)) for _ in range(count)]
    reward = st.sampled_from([0.0, 1.0, -2.0, 0.5, NAN])
    steps = [
        [(end, draw(reward)) for end in draw(st.lists(st.integers(0, n - 1), unique=True, max_size=4))] if n else []
        for n in lengths
    ]
    groups = [draw(st.integers(0, 1)) for _ in range(count)]
    outcome = draw(st.none() | st.lists(st.floats(-2, 2), min_size=count, max_size=count))
    return steps, lengths, groups, outcome


@pytest.mark.parametrize("baseline", ["group", "batch", "none", "loo"])
@each_comparison
@given(batch=batches(), discount=st.sampled_from([1.0, 0.9, 0.0]))
def test_credit_equals_a_loop_over_steps_and_tokens(baseline, how, batch, discount):
    pairs, lengths, groups, outcome = batch
    steps = gather_steps(pairs, lengths)
    if baseline == "loo":
        advantages = steps_leave_one_out(steps, longs(groups), compared_with=how)
    else:
        advantages = steps_relative(steps, longs(groups), baseline, how)
    got = token_advantages(
        steps,
        advantages,
        longs(lengths),
        None if outcome is None else torch.tensor(outcome, dtype=torch.float64),
        CreditMix(process_weight=0.7, outcome_weight=1.5, discount=discount),
    )
    expected = brute_force(
        pairs, lengths, groups, outcome, baseline=baseline, compared_with=how, discount=discount, weights=(0.7, 1.5)
    )
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_optimal_token_baseline_is_the_weighted_mean(seed):
    """Two groups of 3 against loops: W_t sums energies up to t, over the completions that have a t-th trained token."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, 5) for _ in range(6)]
    energies = [[draw.choice([0.0, draw.uniform(0.1, 2)]) for _ in range(n)] for n in lengths]  # 0: not trained
    rewards = [draw.gauss(0, 1) for _ in range(5)] + [math.nan]
    expected = []
    for i, own in enumerate(energies):
        group = [j for j in range(i // 3 * 3, i // 3 * 3 + 3) if not math.isnan(rewards[j])]
        trained = [[e for e in energies[j] if e] for j in group]
        seen = 0
        for energy in own:
            seen += energy > 0
            reach = [(rewards[j], sum(e[:seen])) for j, e in zip(group, trained, strict=True) if len(e) >= seen]
            total = sum(w for _, w in reach)
            baseline = sum(r * w for r, w in reach) / total if energy and len(reach) > 1 else 0.0
            expected.append(rewards[i] - baseline if energy and i in group else 0.0)
    flat = torch.tensor([e for own in energies for e in own], dtype=torch.float64)
    found = optimal_token_baseline(torch.tensor(rewards).double(), flat, torch.tensor(lengths), torch.arange(6) // 3)
    assert torch.allclose(found.to_go, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(spread(found, torch.tensor(lengths)), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("baseline", [steps_relative, steps_leave_one_out])
def test_a_large_offset_does_not_change_the_advantages_of_steps(baseline):
    def advantages(offset):
        steps = gather_steps([[(0, offset + 1.0), (2, offset)], [(1, offset + 3.0)]], [3, 3])
        return baseline(steps, torch.zeros(2, dtype=torch.long)).tolist()

    assert advantages(1e9) == pytest.approx(advantages(0.0))
