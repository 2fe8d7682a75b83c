"""Rollouts compared by the seats they were played in: against loops over subgroups, and exactly in a small game."""

import itertools
import math
import random

import pytest
import torch

from covey.algorithms import ADVANTAGES, grpo, register_advantages, rloo
from covey.algorithms.comparison import (
    RoleAverages,
    RolloutComparison,
    check_comparison,
    check_zero_sum,
    gathered,
    numbers_of,
    scattered,
    whole_groups,
)
from covey.algorithms.credit import assign_credit, signal_stats
from covey.core.records import FinishReason, GameSeat, PromptSample, Rollout, RolloutBatch, Scores, seats_of
from tests.algorithms.test_algorithms import config, rloo_config

ONE = torch.ones(1)
NAN = math.nan


def scores(rewards, seats=(), lengths=None, steps=None):
    rewards = torch.as_tensor(rewards, dtype=torch.float64).view(len(rewards), -1)
    count = len(rewards)
    return Scores(rewards, steps or [{}] * count, lengths or [4] * count, [GameSeat(*seat) for seat in seats])


def credited(method, given, group_size, **more):
    return assign_credit(method, torch.ones(given.rewards.shape[1]), given, group_size, **more).of_completions()


# ---- subgroups -------------------------------------------------------------------------------------------------------


PROPOSED = [("proposer", 0), *[("solver", 0)] * 3, ("proposer", 1), *[("solver", 1)] * 3]
"""Two episodes of a proposer and three solvers."""


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        ("group", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("role", [[0, 4, -1, -1, -1, -1], [1, 2, 3, 5, 6, 7]]),
        ("episode", [[0, -1, -1], [1, 2, 3], [4, -1, -1], [5, 6, 7]]),
        ({"proposer": "role", "solver": "episode"}, [[0, 4, -1], [1, 2, 3], [5, 6, 7]]),
        ({"solver": "episode"}, [[0, 4, -1], [1, 2, 3], [5, 6, 7]]),  # others by role
        ({"proposer": "group", "solver": "group"}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("role_average", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_subgroups_of_two_episodes(compare, expected):
    comparison = RolloutComparison.of(config(compare=compare), scaled=False)
    given = scores([0.0] * 8, PROPOSED)
    members = comparison.subgroups(given, 8) if not comparison.averages else whole_groups(8, 8)
    assert members.tolist() == expected


def test_prompts_are_never_mixed_and_rollouts_without_seats_are_groups():
    comparison = RolloutComparison.of(config(compare="role"), scaled=False)
    seats = [("first", 0), ("second", 0), ("first", 1), ("second", 1)] * 2
    assert comparison.subgroups(scores([0.0] * 8, seats), 4).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert comparison.subgroups(scores([0.0] * 8), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rollouts_that_failed_before_their_role_was_known_are_in_no_subgroup_of_a_role():
    """The last two of the first prompt, and all of the second: their rewards are NaN."""
    seats = [("first", 0), ("second", 0), ("", 1, "", False), ("", 1, "", False), *[("", 0, "", False)] * 4]
    given = scores([1.0, 2.0, *[NAN] * 6], seats)
    for compare in ("role", "episode", {"first": "episode"}):
        comparison = RolloutComparison.of(config(compare=compare), scaled=False)
        assert comparison.subgroups(given, 4).tolist() == [[0], [1]]
    by_group = RolloutComparison.of(config(compare="group"), scaled=False)
    assert by_group.subgroups(given, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    lost = scores([NAN] * 4, seats[4:])  # of a source all of whose rollouts have failed
    assert comparison.subgroups(lost, 4).tolist() == [[0, 1, 2, 3]]


def test_values_go_to_subgroups_and_back():
    members = torch.tensor([[0, 2], [1, -1]])
    values = torch.tensor([5.0, 6.0, 7.0])
    padded = gathered(values, members, NAN)
    assert padded[0].tolist() == [5, 7] and padded[1, 0] == 6 and padded[1, 1].isnan()
    assert scattered(padded, members, 3).tolist() == [5, 6, 7]
    assert numbers_of(members, 3).tolist() == [0, 1, 0]


def test_proposers_are_compared_with_proposers_and_solvers_within_their_task():
    """prime-rl's hierarchical GRPO by hand: means 0.5 of the proposers, 1/3 and 2/3 of the two tasks' solvers."""
    method = grpo.algorithm(config(compare={"proposer": "role", "solver": "episode"}, scale_rewards="none"))
    given = scores([1.0, 1, 0, 0, 0, 1, 1, 0], PROPOSED)
    expected = [0.5, 2 / 3, -1 / 3, -1 / 3, -0.5, 1 / 3, 1 / 3, -2 / 3]
    assert credited(method, given, 8).tolist() == pytest.approx(expected)


METHODS = {
    "grpo": lambda **more: grpo.algorithm(config(**more)),
    "no scale": lambda **more: grpo.algorithm(config(scale_rewards="none", **more)),
    "rloo": lambda **more: rloo.algorithm(rloo_config(**more)),
    **{
        name: lambda name=name, **more: grpo.algorithm(config(advantages=name, **more))
        for name in ("maxrl", "opo", "pass_at_k")
    },
}
"""Methods whose advantages in a subgroup depend on it alone."""


def played(seed, prompts=3, group=7):
    """Random seats and rewards, with some of NaN, and the subgroups of a role and game by a loop."""
    draw = random.Random(seed)
    seats = [(draw.choice(["a", "b", "c"]), draw.randrange(2)) for _ in range(prompts * group)]
    rewards = [draw.choice([0.0, 1.0, draw.random(), NAN]) for _ in seats]
    lengths = [draw.randint(1, 9) for _ in seats]
    return scores(rewards, seats, lengths), [draw.random() for _ in seats]


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("compare", ["role", "episode", {"a": "episode", "b": "group"}])
@pytest.mark.parametrize("name", METHODS)
def test_subgroups_have_the_advantages_that_they_have_alone(name, compare, kl):
    """Unequal sizes, missing rewards, lengths and a KL penalty, against one call for each subgroup."""
    for seed in range(5):
        given, penalties = played(seed)
        penalty = torch.tensor(penalties, dtype=torch.float64) if kl else None
        method = METHODS[name](compare=compare, beta=0.5 if kl else 0.0, kl_in_reward=True)
        found = credited(method, given, 7, kl=penalty)
        alone = METHODS[name](compare="group", beta=0.5 if kl else 0.0, kl_in_reward=True)
        keys = [(n // 7, *method.comparison.key(seat)) for n, seat in enumerate(given.seats)]
        for key in set(keys):
            own = [n for n, one in enumerate(keys) if one == key]
            part = scores(given.rewards[own], [], [given.lengths[n] for n in own])
            expected = credited(alone, part, len(own), kl=None if penalty is None else penalty[own])
            assert found[own].tolist() == expected.tolist(), (seed, key)


@pytest.mark.parametrize("name", [*METHODS, "otb", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_seats_change_no_bit(name):
    make = METHODS.get(name, lambda **more: grpo.algorithm(config(advantages=name, **more)))
    given, _ = played(1)
    one_seat = Scores(given.rewards, given.steps, given.lengths, [GameSeat("a", 0)] * len(given.lengths))
    plain = Scores(given.rewards, given.steps, given.lengths)
    expected = credited(make(compare="group"), plain, 7)
    for compare in ("role", "episode", {"a": "role"}):
        assert torch.equal(credited(make(compare=compare), one_seat, 7), expected)


def test_token_baselines_compare_within_a_subgroup():
    """Two roles of two rollouts: the energies of the other role play no part."""
    seats = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    given = scores([3.0, 10.0, 1.0, 20.0], seats, lengths=[1, 1, 1, 1])
    method = grpo.algorithm(config(advantages="otb", compare="role"))
    credit = assign_credit(method, ONE, given, 4, energies=torch.tensor([1.0, 5.0, 3.0, 5.0]))
    # of role a: rewards 3 and 1 with weights 1 and 3 have the mean 1.5; of role b 15
    assert credit.of_completions().tolist() == pytest.approx([1.5, -5, -0.5, 5])


def test_steps_are_compared_within_a_subgroup():
    seats = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    given = scores(
        [1.0, 10, 3, 20], seats, steps=[{0: [(1, 1.0)]}, {0: [(1, 10.0)]}, {0: [(1, 3.0)]}, {0: [(1, 20.0)]}]
    )
    method = grpo.algorithm(config(compare="role", scale_rewards="none"))
    assert credited(method, given, 4).tolist() == [-1, -5, 1, 5]


def test_a_rollout_alone_has_no_advantage():
    given = scores([1.0, 0.0, 5.0], [("a", 0), ("a", 0), ("b", 0)])
    for name in ("grpo", "no scale", "rloo", "maxrl", "opo"):
        assert credited(METHODS[name](compare="role"), given, 3)[2] == 0


def test_the_share_of_prompts_without_a_signal_stays_by_prompt():
    """The first prompt's roles are alike within themselves; compared as a group they differ."""
    seats = [("a", 0), ("b", 0), ("a", 1), ("b", 1)] * 2
    given = scores([1.0, 0, 1, 0, 1, 0, 0, 0], seats)
    credits = [assign_credit(METHODS["grpo"](compare=one), ONE, given, 4) for one in ("role", "group")]
    shares = [signal_stats(credit, 4) for credit in credits]
    assert [one["frac_advantage_zero"].value() for one in shares] == [0.5, 0.0]


def test_registered_advantages_see_roles_and_games():
    seen = []
    register_advantages("looks", lambda x: seen.append(x) or x.totals - x.totals.nanmean(1, keepdim=True))
    try:
        given = scores([1.0, 2, 3], [("b", 0), ("a", 0), ("b", 1)])
        credited(grpo.algorithm(config(advantages="looks", compare="group")), given, 3)
        credited(grpo.algorithm(config(advantages="looks", compare="role")), given, 3)
    finally:
        ADVANTAGES.pop("looks")
    whole, by_role = seen
    assert whole.role_names == ("a", "b")
    assert (whole.roles.tolist(), whole.games.tolist()) == ([[1, 0, 1]], [[0, 0, 1]])
    assert (by_role.roles.tolist(), by_role.lengths.tolist()) == ([[1, 1], [0, -1]], [[4, 4], [4, 0]])


# ---- running means ---------------------------------------------------------------------------------------------------


def test_running_means_of_three_rollout_batches_by_hand():
    """d = 0.5: after 4 and 2, b = 0.5 (0.5 · 4) + 0.5 · 2 = 2 and the mean is 2 / (1 - 0.25) = 8/3."""
    averages, role = RoleAverages(0.5), [("a", 0), ("a", 1)]
    method = grpo.algorithm(config(compare="role_average", role_decay=0.5))

    def batch(rewards):
        given = scores(rewards, role)
        found = credited(method, given, 2, baselines=averages.baselines(given))
        averages.update(given, given.rewards[:, 0])
        return found.tolist()

    assert batch([4.0, 2.0]) == [4, 2]  # the first advantages are the rewards
    assert batch([3.0, NAN]) == pytest.approx([3 - 8 / 3, 0])  # no reward is no update
    # b = 0.5 · 2 + 0.5 · 3 = 2.5 after 3 rewards: 2.5 / (1 - 0.125) = 20/7
    assert batch([0.0, 1.0]) == pytest.approx([-20 / 7, 1 - 20 / 7])


def test_running_means_are_by_environment_and_role_and_continue_from_their_state():
    averages = RoleAverages(0.9)
    seats = [("a", 0, "x"), ("a", 0, "y"), ("b", 0, "x")]
    averages.update(scores([1.0, 2.0, 3.0], seats), torch.tensor([1.0, 2.0, 3.0]))
    assert averages.baselines(scores([0.0] * 3, seats)).tolist() == pytest.approx([1, 2, 3])
    other = RoleAverages(0.9)
    other.load_state_dict(averages.state_dict())
    assert other.means == averages.means
    assert averages.baseline("x", "unseen") == 0


def test_running_means_may_be_divided_by_the_deviation_of_each_role():
    method = grpo.algorithm(config(compare="role_average", scale_rewards="batch"))
    given = scores([1.0, 3.0, 10.0, 30.0], [("a", 0), ("a", 1), ("b", 0), ("b", 1)])
    found = credited(method, given, 4, baselines=torch.zeros(4, dtype=torch.float64))
    of_a, of_b = math.sqrt(2) + 1e-4, 10 * math.sqrt(2) + 1e-4
    assert found.tolist() == pytest.approx([1 / of_a, 3 / of_a, 10 / of_b, 30 / of_b])


def test_a_penalty_is_part_of_what_is_averaged():
    method = rloo.algorithm(rloo_config(compare="role_average", beta=0.5))
    given = scores([1.0, 3.0], [("a", 0), ("a", 1)])
    found = credited(method, given, 2, kl=torch.tensor([2.0, 0.0]), baselines=torch.ones(2, dtype=torch.float64))
    assert found.tolist() == [-1, 2]


def test_running_means_are_of_whole_rollouts():
    given = scores([1.0], [("a", 0)], steps=[{0: [(1, 1.0)]}])
    with pytest.raises(ValueError, match="role_average"):
        credited(grpo.algorithm(config(compare="role_average")), given, 1, baselines=torch.zeros(1))


# ---- a game that can be enumerated -----------------------------------------------------------------------------------

PAYOFF = torch.tensor([[0.9, 0.2, 0.5], [0.4, 0.7, 0.1], [0.8, 0.3, 0.6]], dtype=torch.float64)  # of the first seat
LOGITS = [torch.tensor([0.2, -0.1, 0.4]).double(), torch.tensor([-0.3, 0.1, 0.0]).double()]
GAMES = 2


def exact():
    """∂V_i of each seat's own value by autograd, the other held fixed."""
    seats = [one.clone().requires_grad_() for one in LOGITS]
    first, second = (one.softmax(0) for one in seats)
    return [
        torch.autograd.grad(sign * first @ PAYOFF @ second, one, retain_graph=True)[0]
        for sign, one in zip((1, -1), seats, strict=True)
    ]


def expected_gradients(method, baselines=None):
    """Expectation of both seats' gradients over all outcomes of two games, by the advantages of `method`."""
    policies = [one.softmax(0) for one in LOGITS]
    found = [torch.zeros(3, dtype=torch.float64) for _ in LOGITS]
    for moves in itertools.product(itertools.product(range(3), repeat=2), repeat=GAMES):
        probability = math.prod(float(policies[0][i] * policies[1][j]) for i, j in moves)
        rewards = [sign * float(PAYOFF[i, j]) for i, j in moves for sign in (1, -1)]
        given = scores(rewards, [(role, game) for game in range(GAMES) for role in ("first", "second")])
        advantages = credited(method, given, 2 * GAMES, baselines=baselines).double().tolist()
        for number, advantage in enumerate(advantages):
            seat = number % 2
            score = torch.eye(3, dtype=torch.float64)[moves[number // 2][seat]] - policies[seat]
            found[seat] += probability * advantage / GAMES * score
    return found


def sizes(found):
    """Length of each seat's gradient along the exact one, relative to it."""
    return [float(one @ true / (true @ true)) for one, true in zip(found, exact(), strict=True)]


def cosine(found):
    one, true = torch.cat(found), torch.cat(exact())
    return float(one @ true / (one.norm() * true.norm()))


@pytest.mark.parametrize(
    ("method", "size"),
    [
        (grpo.algorithm(config(scale_rewards="none")), 1.0),  # the mean of both seats is 0: no baseline at all
        (grpo.algorithm(config(scale_rewards="none", compare="role")), 0.5),  # (n - 1) / n, n = 2 games
        (rloo.algorithm(rloo_config(compare="role", beta=0.0)), 1.0),
    ],
    ids=["group", "role", "role, one left out"],
)
def test_each_seat_climbs_its_own_value(method, size):
    """The simultaneous gradient: for a zero-sum game it is not that of the sum of the values, which is 0."""
    for one, true in zip(expected_gradients(method), exact(), strict=True):
        assert torch.allclose(one, size * true, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 0.4882, -3.0])
def test_any_constant_of_a_role_leaves_the_expectation(constant):
    method = grpo.algorithm(config(compare="role_average"))
    baselines = torch.tensor([constant, -constant] * GAMES, dtype=torch.float64)
    for one, true in zip(expected_gradients(method, baselines), exact(), strict=True):
        assert torch.allclose(one, true, atol=1e-6)


def test_the_deviation_of_both_seats_together_changes_their_steps():
    """What the guide says of scale_rewards: 1.31 and 0.72 in a mixed group, 1.71 and 1.60 within the role."""
    mixed = expected_gradients(grpo.algorithm(config()))
    within = expected_gradients(grpo.algorithm(config(compare="role")))
    assert sizes(mixed) == pytest.approx([1.313, 0.719], abs=1e-3)
    assert sizes(within) == pytest.approx([1.708, 1.602], abs=1e-3)
    assert [cosine(mixed), cosine(within)] == pytest.approx([0.9734, 0.9979], abs=1e-4)


def variance(baselines):
    """Trace of the covariance of the gradient of one game with a baseline for each seat."""
    policies, mean, square = [one.softmax(0) for one in LOGITS], torch.zeros(6, dtype=torch.float64), 0.0
    for i, j in itertools.product(range(3), repeat=2):
        weight = float(policies[0][i] * policies[1][j])
        given = scores([float(PAYOFF[i, j]), -float(PAYOFF[i, j])], [("first", 0), ("second", 0)])
        method = grpo.algorithm(config(compare="role_average"))
        a = credited(method, given, 2, baselines=torch.tensor(baselines, dtype=torch.float64)).double()
        unit = torch.eye(3, dtype=torch.float64)
        gradient = torch.cat([a[0] * (unit[i] - policies[0]), a[1] * (unit[j] - policies[1])])
        mean, square = mean + weight * gradient, square + weight * float(gradient @ gradient)
    return square - float(mean @ mean)


def test_a_baseline_of_the_role_has_the_least_noise():
    value = float(LOGITS[0].softmax(0) @ PAYOFF @ LOGITS[1].softmax(0))
    assert value == pytest.approx(0.4882, abs=1e-4)
    assert variance([value, -value]) == pytest.approx(0.0773, abs=1e-4)
    assert variance([0.0, 0.0]) == pytest.approx(0.3986, abs=1e-4)
    assert variance([-value, value]) == pytest.approx(1.3452, abs=1e-4)


def test_both_seats_in_one_rollout_would_train_the_second_for_the_first():
    """Why a rollout is one seat's: with the first seat's reward the second one's gradient is exactly reversed."""
    policies, value = [one.softmax(0) for one in LOGITS], float(LOGITS[0].softmax(0) @ PAYOFF @ LOGITS[1].softmax(0))
    found = torch.zeros(3, dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        score = torch.eye(3, dtype=torch.float64)[j] - policies[1]
        found += float(policies[0][i] * policies[1][j]) * (float(PAYOFF[i, j]) - value) * score
    assert torch.allclose(found, -exact()[1], atol=1e-12)


# ---- checks ----------------------------------------------------------------------------------------------------------


def codes(compare, seats, rewards=None, group_size=None, k=None):
    comparison = RolloutComparison.of(config(compare=compare), scaled=False)
    given = scores(rewards or [0.0] * 8, seats)
    found = check_comparison(comparison, f"compare={compare!r}", given, group_size or 8, k)
    return [(one.code, one.level) for one in found]


TWO_SEATS = [(role, game) for game in range(4) for role in ("first", "second")]


@pytest.mark.parametrize(
    ("compare", "seats", "expected"),
    [
        ("group", (), []),
        ("role", TWO_SEATS, []),
        ("role_average", TWO_SEATS, []),
        ("role", (), [("roles-missing", "error")]),
        ("role_average", (), [("roles-missing", "error")]),
        ("episode", TWO_SEATS, [("roles-alone", "error")]),
        ({"first": "episode", "second": "episode"}, TWO_SEATS, [("roles-alone", "error")]),
        ({"frist": "role"}, TWO_SEATS, [("roles-unknown", "error")]),
        ({"first": "role", "second": "role", "third": "episode"}, TWO_SEATS, [("roles-unknown", "warning")]),
    ],
    ids=str,
)
def test_seats_and_their_comparison(compare, seats, expected):
    assert codes(compare, seats) == expected


def test_errors_of_seats_name_what_they_saw():
    comparison = RolloutComparison.of(config(compare="episode"), scaled=False)
    (found,) = check_comparison(comparison, "compare='episode'", scores([0.0] * 8, TWO_SEATS), 8)
    for value in ("'episode'", "8 rollouts", "first, second", "0 to 3"):
        assert value in found.evidence
    (found,) = check_comparison(
        RolloutComparison("role", {"frist": "role"}), "compare", scores([0.0] * 8, TWO_SEATS), 8
    )
    assert "'first'" in found.fix


def test_pass_at_k_needs_subgroups_of_k():
    assert codes("role", TWO_SEATS, k=4) == []
    assert codes("role", TWO_SEATS, k=5) == [("roles-few", "error")]


@pytest.mark.parametrize(
    ("compare", "selects", "expected"),
    [
        ("group", {"dynamic": True, "difficulty": False}, ["warning"]),
        ("role", {"dynamic": True, "difficulty": False}, []),
        ("role", {"dynamic": False, "difficulty": True}, ["error"]),
        ("group", {"dynamic": False, "difficulty": False}, []),
    ],
)
def test_prompts_are_not_selected_by_rewards_that_cancel(compare, selects, expected):
    comparison = RolloutComparison.of(config(compare=compare), scaled=False)
    cancel = scores([1.0, -1, 0, 0, -1, 1, 1, -1], TWO_SEATS)
    found = [*check_zero_sum(comparison, cancel, ONE, 8, **selects)]
    assert [one.level for one in found] == expected
    assert all(one.code == "roles-zero-sum" for one in found)
    both_gain = scores([1.0, 1, 0, 0, 1, 1, 1, 1], TWO_SEATS)
    assert [*check_zero_sum(comparison, both_gain, ONE, 8, **selects)] == []


def test_the_role_of_a_failed_rollout_is_unknown_where_it_has_none():
    def ended(role, finish):
        return Rollout([1], [2], [True], None, "", finish, role=role)

    samples = [PromptSample({}, 0, n) for n in range(4)]
    ends = [("first", FinishReason.ERROR), ("", FinishReason.ERROR), ("", FinishReason.STOP), ("b", FinishReason.STOP)]
    seats = seats_of(samples, [ended(*one) for one in ends])
    assert [(one.role, one.known) for one in seats] == [("first", True), ("", False), ("", True), ("b", True)]


def test_seats_travel_with_the_scores():
    samples = [PromptSample({"prompt": "x", "environment": "chess"}, 0, n) for n in range(2)]
    plain, seated = (Rollout([1], [2], [True], None, "a", FinishReason.STOP) for _ in range(2))
    seated.role, seated.game = "first", 3

    def batch(rollouts):
        return RolloutBatch(samples, rollouts, torch.zeros(2, 1), {}, [{}, {}]).scores

    assert batch([plain, plain]).seats == []
    mixed = batch([plain, seated])
    assert mixed.seats == [GameSeat("", 0, "chess"), GameSeat("first", 3, "chess")]
    assert Scores.joined([batch([plain, plain]), mixed]).seats == [GameSeat(""), GameSeat(""), *mixed.seats]
