"""Credit of a rollout batch: which function rewards steps, what processes have to know, what the KL does. By eye."""

import math

import pytest
import torch

from covey.algorithms import grpo, rloo
from covey.algorithms.comparison import whole_groups
from covey.algorithms.credit import (
    Judge,
    Scores,
    assign_credit,
    credit_by_source,
    members_by_source,
    signal_stats,
    spread_by_source,
    spread_of_rewards,
    step_stats,
    weights_by_source,
)
from covey.algorithms.registered import ADVANTAGES
from covey.core.findings import CheckError
from covey.core.stats import merge_all
from tests.support import runs

NAN = math.nan
ONE = torch.ones(1)


def algorithm(method="grpo", **settings):
    settings = {"scale_rewards": "none"} | settings if method == "grpo" else settings
    return {"grpo": grpo, "rloo": rloo}[method].algorithm(runs.config("unused", method, **settings))


def scores(rewards, steps=None, lengths=None):
    rewards = torch.as_tensor(rewards)
    count = len(rewards)
    return Scores(rewards, steps or [{}] * count, lengths or [4] * count)


def by(weights):
    return lambda source: Judge(algorithm(), weights)


def tokens(credit, count):
    return [credit.of_tokens(slice(row, row + 1)).tolist() for row in range(count)]


def test_outcomes_are_the_same_for_all_tokens():
    credit = assign_credit(algorithm(), ONE, scores([[2.0], [0.0]], lengths=[3, 1]), 2)
    assert tokens(credit, 2) == [[1, 1, 1], [-1]]
    assert credit.of_completions().tolist() == [1, -1]
    assert credit.has_signal().tolist() == [True, True]


def fading(x):
    """R - mean of the group, times 1, 2, 3, ... from the first token on."""
    return (x.totals - x.totals.nanmean(1, keepdim=True))[..., None] * torch.arange(1, int(x.lengths.max()) + 1)


@pytest.fixture
def per_token(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "fading", fading)
    return algorithm(advantages="fading")


def test_a_function_of_the_group_may_credit_each_token(per_token):
    """Rewards 2 and 0, mean 1; 5 and no reward; lengths 3, 1, 2 and 2."""
    given = scores([[2.0], [0.0], [5.0], [NAN]], lengths=[3, 1, 2, 2])
    credit = assign_credit(per_token, ONE, given, 2)
    assert tokens(credit, 4) == [[1, 2, 3], [-1], [0, 0], [0, 0]]
    assert credit.of_tokens(slice(0, 2)).tolist() == [1, 2, 3, -1]
    assert credit.of_completions().tolist() == [1, -1, 0, 0]
    assert credit.has_signal().tolist() == [True, True, False, False]


def test_credit_of_each_token_needs_a_loss_and_rewards_that_go_with_it(per_token, monkeypatch):
    with pytest.raises(CheckError) as error:
        assign_credit(per_token, ONE, scores([[3.0], [1.0]], [{0: [(1, 3.0)]}, {}]), 2)
    assert error.value.codes == ["advantages-twice"]
    shares = algorithm(advantages="fading", importance_sampling_level="sequence")
    with pytest.raises(CheckError) as error:
        assign_credit(shares, ONE, scores([[3.0], [1.0]]), 2)
    assert error.value.codes == ["advantages-tokens"]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 3), (1, 2, 3, 1)])
def test_credit_of_other_shapes_is_refused(monkeypatch, shape):
    monkeypatch.setitem(ADVANTAGES, "fading", lambda x: torch.zeros(shape))
    with pytest.raises(ValueError, match=r"\[1, 2\], .* \[1, 2, 3\]"):
        assign_credit(algorithm(advantages="fading"), ONE, scores([[2.0], [0.0]], lengths=[3, 1]), 2)


def test_a_number_of_a_process_function_is_one_last_step():
    """Steps 3 and 0 and the number 1: mean 4/3; to go 5/3 - 4/3 and -4/3, and -1/3."""
    given = scores([[3.0], [1.0]], [{0: [(1, 3.0), (2, 0.0)]}, {}])
    credit = assign_credit(algorithm(), ONE, given, 2)
    assert [pytest.approx(row, abs=1e-6) for row in tokens(credit, 2)] == [[1 / 3, 1 / 3, -4 / 3, 0], [-1 / 3] * 4]
    assert credit.of_completions().tolist() == pytest.approx([1 / 3, -1 / 3])


def test_whoever_rewards_steps_on_any_process_does_so_on_all():
    """Groups of two, cut in the middle; the process that saw numbers alone treats them as steps all the same."""
    mine, theirs = scores([[1.0], [4.0], [1.0]], lengths=[2, 2, 3]), scores([[5.0]], [{0: [(0, 5.0)]}], [3])
    assert mine.process_functions == []
    whole = Scores.joined([mine, theirs])
    assert whole.process_functions == [0]
    credit = assign_credit(algorithm(step_discount=0.0, outcome_weight=0.0), ONE, whole, 2)
    assert tokens(credit, 4) == [[-1.5, -1.5], [1.5, 1.5], [-2, -2, -2], [2, 0, 0]]
    assert credit.of_tokens(slice(0, 3)).tolist() == [-1.5, -1.5, 1.5, 1.5, -2, -2, -2]
    assert credit.of_tokens(slice(3, 4)).tolist() == [2, 0, 0]


def test_outcomes_go_on_as_without_steps():
    """The outcome's mean is that of the numbers 1 and 3, whatever the sums of steps beside them are."""
    given = scores([[100.0, 1.0], [0.0, 3.0]], [{0: [(0, 100.0)]}, {0: [(0, 0.0)]}])
    credit = assign_credit(algorithm(process_weight=0.0, outcome_weight=2.0), torch.ones(2), given, 2)
    assert tokens(credit, 2) == [[-2] * 4, [2] * 4]


def test_a_completion_without_reward_has_no_steps_either():
    """What failed keeps its ends, and earns nothing."""
    given = scores([[NAN], [1.0], [0.0]], [{0: [(1, 9.0)]}, {0: [(1, 1.0)]}, {0: [(1, 0.0)]}])
    assert tokens(assign_credit(algorithm(), ONE, given, 3), 3) == [[0] * 4, [0.5, 0.5, 0, 0], [-0.5, -0.5, 0, 0]]


def test_empty_completions_and_empty_lists():
    given = scores([[2.0], [0.0], [1.0], [0.0]], [{}, {0: []}, {0: [(0, 1.0)]}, {0: [(0, 0.0)]}], [0, 2, 1, 1])
    credit = assign_credit(algorithm(), ONE, given, 4)
    assert tokens(credit, 4) == [[], [0, 0], [0.5], [-0.5]]
    assert credit.has_signal().tolist() == [False, False, True, True]


def test_without_completions_there_is_no_credit():
    credit = assign_credit(algorithm(), ONE, scores(torch.zeros(0, 1)), 2)
    assert credit.of_tokens(slice(0, 0)).tolist() == [] and credit.of_completions().tolist() == []


def test_rloos_penalty_acts_where_steps_alone_are_rewarded():
    """KL 1 and 3 with beta 0.5: -0.5 + 1.5 = 1 and -1 for all tokens, beside what the equal steps give: nothing."""
    steps = [{0: [(0, 1.0)]}, {0: [(0, 1.0)]}]
    credit = assign_credit(algorithm("rloo", beta=0.5), ONE, scores([[1.0], [1.0]], steps), 2, torch.tensor([1.0, 3.0]))
    assert tokens(credit, 2) == [[1] * 4, [-1] * 4]


def test_it_acts_only_in_groups_without_an_outcome():
    """Group 0 has an outcome for one completion, which has nobody to be compared with; in group 1 nobody scored one."""
    steps = [{0: [(0, 1.0)]}] * 5 + [{}]
    given = scores([[1.0, 2.0], [1.0, NAN], [1.0, NAN], *[[1.0, NAN]] * 2, [NAN, NAN]], steps)
    kl = torch.tensor([1.0, 3.0, 5.0, 1.0, 3.0, 7.0])
    credit = assign_credit(algorithm("rloo", beta=0.5), torch.ones(2), given, 3, kl)
    assert credit.of_completions().tolist() == [0, 0, 0, 1, -1, 0]


def test_rloo_clips_each_step():
    steps = [{0: [(0, 9.0)]}, {0: [(0, 1.0)]}]
    method = algorithm("rloo", beta=0.0, reward_clip_range=(0.0, 2.0))
    assert assign_credit(method, ONE, scores([[9.0], [1.0]], steps), 2).of_completions().tolist() == [1, -1]


def test_normalised_one_by_one_and_once_more():
    """z = ±a of each function, a = 1/√2 to rounding; S = ±3a at the common end of both, ±a at the other one."""
    one, two = [{0: [(0, 1.0)], 1: [(0, 5.0)]}, {0: [(0, 0.0)], 1: [(2, 3.0)]}], torch.tensor([1.0, 2.0])
    method = algorithm(multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    got = assign_credit(method, two, scores([[1.0, 5.0], [0.0, 3.0]], one), 2).of_completions()
    a = math.sqrt(0.5)  # S: 3a, -a (token 0) and -2a (token 2)
    deviation = math.sqrt((9 + 1 + 4) * 0.5 / 2)
    assert got.tolist() == pytest.approx([3 * a / deviation, -3 * a / deviation], rel=1e-3)


def test_equal_sums_of_different_steps_are_a_signal():
    """Two steps, worth 1 and 0 or 0 and 1: the first tokens tie at γ = 1, the others do not."""
    steps = [{0: [(1, 1.0), (3, 0.0)]}, {0: [(1, 0.0), (3, 1.0)]}]
    given = scores([[1.0], [1.0]], steps)
    assert assign_credit(algorithm(), ONE, given, 2).has_signal().tolist() == [True, True]
    assert assign_credit(algorithm(), ONE, given, 2).of_completions().tolist() == [0, 0]
    same = scores([[1.0], [1.0]], [{0: [(0, 0.5), (1, 0.5)]}, {0: [(2, 0.5), (3, 0.5)]}])
    assert assign_credit(algorithm(), ONE, same, 2).has_signal().tolist() == [False, False]


def test_metrics_of_steps():
    """4 rewarded steps of 4 completions (one abstains, a number is one), mean 5/4; the second group is all alike."""
    steps = [{0: [(0, 1.0), (1, NAN)]}, {}, {0: [(0, 1.0)]}, {0: [(3, 1.0)]}]
    stats = step_stats(by(ONE), scores([[1.0], [2.0], [1.0], [1.0]], steps), ["right"], whole_groups(4, 2))
    assert {name: stat.value() for name, stat in stats.items()} == {
        "steps/right/mean": 1.25,
        "steps/per_completion": 1.0,
        "frac_reward_zero_std": 0.5,
    }
    assert merge_all(dict(stats), stats)["steps/per_completion"].value() == 1.0  # every process adds the same
    assert step_stats(by(ONE), scores([[1.0], [2.0]]), ["right"], whole_groups(2, 2)) == {}


@pytest.mark.parametrize(
    ("rewards", "method", "settings", "share"),
    [
        ([1.0, 1.0, 3.0, 3.0], "grpo", {}, 1.0),
        ([1.0, 1.0, 3.0, 3.0], "grpo", {"advantages": "opo"}, 1.0),
        ([1.0, 1.0, 3.0, 3.0], "grpo", {"advantages": "reinforce_plus_plus"}, 0.0),  # mean 2: -1, -1, 1, 1
        ([1.0, 1.0, 3.0, 3.0], "rloo", {"advantages": "reinforce_plus_plus", "beta": 0.0}, 0.0),
        ([1.0, 1.0, 1.0, 1.0], "grpo", {"advantages": "reinforce_plus_plus"}, 1.0),
        ([7.0, 9.0, 1.0, 3.0], "rloo", {"beta": 0.0, "reward_clip_range": (0.0, 5.0)}, 0.5),  # 5 and 5
        ([7.0, 9.0, 1.0, 3.0], "grpo", {"outcome_weight": 0.0}, 1.0),
    ],
)
def test_groups_without_a_signal_are_counted_by_advantages(rewards, method, settings, share):
    method, given = algorithm(method, **settings), scores([[reward] for reward in rewards])
    credit = assign_credit(method, ONE, given, 2)
    assert signal_stats(credit, 2)["frac_advantage_zero"].value() == share


def test_how_much_rewards_differ():
    """Function 0 rewards steps: 1, 0, 0, 1 have variance 1/4, times 2² of its weight; function 1 gives outcomes."""
    steps = [{0: [(0, 1.0), (1, 0.0)]}, {0: [(0, 0.0), (1, 1.0)]}, {}, {}]
    given = scores([[1.0, 3.0], [1.0, 5.0], [NAN, 1.0], [NAN, NAN]], steps)
    totals, variances = spread_of_rewards(given, torch.tensor([2.0, 1.0]), whole_groups(len(given.lengths), 2))
    assert totals[0].tolist() == [3, 5] and totals[1, 0] == 1 and totals[1, 1].isnan()
    assert variances[0] == 1.0 and variances[1].isnan()


# ---- credit by source ------------------------------------------------------------------------------------------------


def two_sources(*totals_by_source):
    """Groups of two from sources a and b by turns, with these rewards."""
    pairs = [*zip(*totals_by_source, strict=True)]
    rewards = [[value] for pair in pairs for group in pair for value in group]
    names = [name for _ in pairs for name in ("a", "a", "b", "b")]
    return Scores(torch.tensor(rewards, dtype=torch.float64), [{}] * len(names), [4] * len(names), [], names)


def test_deviations_of_a_batch_are_a_sources_own():
    """Rewards of 0 and 1 next to 0 and 100: over both, the deviation of 16 each is 43.8."""
    given = two_sources([(0.0, 1.0)] * 8, [(0.0, 100.0)] * 8)
    method = algorithm(scale_rewards="batch")
    together = assign_credit(method, ONE, Scores(given.rewards, given.steps, given.lengths), 2).of_completions()
    assert together[:4].tolist() == pytest.approx([-0.0114, 0.0114, -1.141, 1.141], rel=2e-3)
    apart = credit_by_source(lambda source: Judge(method, ONE), given, 2).of_completions()
    assert apart[:4].tolist() == pytest.approx([-0.968, 0.968, -0.968, 0.968], rel=2e-3)


def test_each_source_has_the_credit_that_it_has_alone():
    given = two_sources([(0.0, 1.0), (1.0, 1.0)], [(3.0, 5.0), (2.0, 8.0)])
    judges = {"a": Judge(algorithm(scale_rewards="group"), ONE), "b": Judge(algorithm("rloo"), 2 * ONE)}
    found = credit_by_source(judges.__getitem__, given, 2).of_completions()
    for name, rows in given.by_source().items():
        alone = assign_credit(*judges[name], given.take(rows), 2).of_completions()
        assert torch.equal(found[rows], alone)
    assert weights_by_source(judges.__getitem__, given).tolist() == [[1.0], [1.0], [2.0], [2.0]] * 2


def test_subgroups_and_spreads_by_source_are_in_the_order_of_sampling():
    given = two_sources([(0.0, 1.0), (1.0, 1.0)], [(3.0, 5.0), (2.0, 8.0)])
    judges = {"a": Judge(algorithm(), ONE), "b": Judge(algorithm(), 2 * ONE)}
    members = members_by_source(judges.__getitem__, given, 2)
    assert members.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    totals, _ = spread_by_source(judges.__getitem__, given, members)
    assert totals.tolist() == [[0.0, 1.0], [6.0, 10.0], [1.0, 1.0], [4.0, 16.0]]
