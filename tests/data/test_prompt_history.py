"""What is known about prompts, and how often they come because of it."""

import pytest
import torch

from covey.data.samplers import PromptHistory, sampler_of

NO_STEPS = torch.tensor([float("nan")])


def history(rewards_by_prompt, floor=0.1):
    known = PromptHistory(4, sampler_of("difficulty", floor), floor)
    for prompt, rewards in rewards_by_prompt:
        known.update([prompt], torch.tensor([rewards]), NO_STEPS)
    return known


def test_rewards_of_0_and_1_give_pass_rates_and_their_variance():
    known = history([(0, [0.0, 0.0, 0.0, 1.0]), (1, [1.0, 1.0, 0.0, 0.0]), (2, [1.0, 1.0, 1.0, 1.0])])
    assert known.means[:3].tolist() == [0.25, 0.5, 1.0]
    # The largest p (1 - p) is 1/4: 0.1 + 0.9 * (0.25 * 0.75) / 0.25 = 0.775; not seen yet: 1
    assert [known.chance(row) for row in range(4)] == pytest.approx([0.775, 1.0, 0.1, 1.0])


def test_the_newest_group_counts_half():
    known = history([(0, [0.0, 0.0]), (0, [1.0, 1.0]), (0, [1.0, 1.0])])
    assert known.means[0] == 0.75  # 0, then (0 + 1) / 2, then (0.5 + 1) / 2
    known.update([1], torch.tensor([[0.0, 1.0]]), NO_STEPS)
    assert known.chance(0) == pytest.approx(0.1 + 0.9 * 4 * 0.75 * 0.25)


def test_while_every_reward_was_the_same_all_prompts_are_alike():
    known = history([(0, [0.0, 0.0]), (1, [0.0, 0.0])])
    assert [known.chance(row) for row in range(4)] == [1.0] * 4


def test_a_constant_reward_within_the_range_has_no_difficulty():
    known = history([(0, [0.5, 0.5]), (1, [0.0, 1.0])])
    assert known.chance(0) == pytest.approx(0.1)


@pytest.mark.parametrize(("scale", "shift"), [(10.0, 0.0), (0.5, -3.0)])
def test_scaled_and_shifted_rewards_give_the_same_chances(scale, shift):
    groups = [(0, [0.0, 0.25, 1.0]), (1, [0.5, 0.5, 1.0]), (0, [0.75, 0.25, 0.0])]
    other = [(row, [scale * reward + shift for reward in rewards]) for row, rewards in groups]
    chances = [[history(g).chance(row) for row in range(3)] for g in (groups, other)]
    assert chances[0] == pytest.approx(chances[1])


def test_abstentions_are_left_out_also_as_whole_groups():
    nan = float("nan")
    known = history([(0, [nan, 1.0, 0.0, nan]), (1, [nan, nan])])
    assert known.means[0] == 0.5
    assert not known.seen(1) and known.chance(1) == 1.0


def test_rewards_of_steps_add_their_variance():
    """Outcomes that tie and steps that differ; steps alone; and a group of which nobody rewarded anything."""
    nan, known = float("nan"), PromptHistory(4, sampler_of("difficulty", 0.1), 0.1)
    rewards = torch.tensor([[1.0, 1.0], [nan, nan], [nan, nan], [0.0, 1.0]])
    known.update([0, 1, 2, 3], rewards, torch.tensor([0.125, 0.25, nan, 0.25]))
    # variances 0 + 1/8, 1/4, not seen, 1/4 + 1/4
    assert [known.chance(row) for row in range(4)] == pytest.approx([0.1 + 0.9 / 4, 0.1 + 0.9 / 2, 1.0, 1.0])
    assert [known.seen(row) for row in range(4)] == [True, True, False, True]


def test_what_is_known_survives_a_checkpoint():
    known, again = history([(0, [0.0, 1.0]), (1, [1.0, 1.0])]), PromptHistory(4, sampler_of("difficulty", 0.1), 0.1)
    again.load_state_dict(known.state_dict())
    for one in (known, again):
        one.update([0, 2], torch.tensor([[1.0, 1.0], [0.0, 0.0]]), NO_STEPS.expand(2))
    assert [again.chance(row) for row in range(4)] == [known.chance(row) for row in range(4)]


def test_metrics_are_about_the_prompts_seen():
    stats = history([(0, [0.0, 1.0]), (1, [1.0, 1.0])]).stats()
    values = {name: stat.value() for name, stat in stats.items()}
    assert values["seen_fraction"] == 0.5
    assert values["chance"] == pytest.approx((1.0 + 0.1) / 2)
    assert values["settled_fraction"] == 0.5
