"""Metrics reduce to the right values over windows and processes."""

import math

import pytest
import torch

from covey.core.likeness import Keys
from covey.core.stats import Max, Mean, Min, Sum
from covey.observability.metrics import MetricLog, rollout_batch_stats


def two_processes(first: MetricLog, second: MetricLog, mode: str = "train") -> dict[str, float]:
    """Drain `first` as if `second` were the other process."""
    second._gather = lambda mine: [first_object[0], mine]
    first_object = []
    first._gather = lambda mine: first_object.append(mine) or [mine]
    first.drain(mode)
    return second.drain(mode)


def test_a_mean_weighs_values_not_calls():
    log = MetricLog()
    log.add({"reward": Mean.of([1.0, 1.0, 1.0])})
    log.add({"reward": Mean.of([0.0])})
    assert log.drain("train") == {"reward": 0.75}


def test_processes_with_different_names_and_counts_merge():
    first, second = MetricLog(), MetricLog()
    first.add({"a": Mean(6.0, 2.0), "low": Min(3.0), "high": Max(3.0), "n": Sum(1.0)})
    second.add({"a": Mean(0.0, 1.0), "low": Min(2.0), "high": Max(2.0), "n": Sum(2.0), "only_here": Mean(1.0, 1.0)})
    assert two_processes(first, second) == {"a": 2.0, "low": 2.0, "high": 3.0, "n": 3.0, "only_here": 1.0}


def test_draining_clears_one_mode():
    log = MetricLog()
    log.add({"reward": Mean(3.0, 1.0)})
    log.add({"reward": Mean(1.0, 1.0)}, "eval")
    assert log.drain("train") == {"reward": 3.0}
    assert log.drain("eval", prefix="eval_") == {"eval_reward": 1.0}
    assert log.drain("eval") == log.drain("train") == {}


def test_what_has_no_value_is_left_out():
    log = MetricLog()
    log.add({"nothing": Mean(0.0, 0.0), "low": Min(math.nan)})
    assert log.drain("train") == {}


def test_state_survives_a_round_trip():
    log = MetricLog()
    log.add({"a": Mean(3.0, 2.0), "b": Min(1.0), "c": Max(2.0), "d": Sum(4.0)})
    state = log.state_dict()
    resumed = MetricLog()
    resumed.load_state_dict({**state, "assigned": {"train": {"num_tokens": 7}}})  # as earlier versions saved it
    resumed.add({"a": Mean(1.0, 2.0)})
    assert resumed.drain("train") == {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}


def example_stats(**changes):
    arguments = {
        "lengths": [2, 4, 6, 8],
        "truncated": [False, False, True, True],
        "rewards_NF": torch.tensor([[1.0, 0.0], [0.0, math.nan], [1.0, 2.0], [1.0, 2.0]]),
        "weights": torch.tensor([1.0, 0.5]),
        "names": ["right", "short"],
        "num_generations": 2,
    }
    return {name: stat.value() for name, stat in rollout_batch_stats(**{**arguments, **changes}).items()}


def test_lengths_of_all_and_of_terminated_completions():
    stats = example_stats()
    assert [stats[f"completions/{which}_length"] for which in ("mean", "min", "max")] == [5, 2, 8]
    assert [stats[f"completions/{which}_terminated_length"] for which in ("mean", "min", "max")] == [3, 2, 4]
    assert stats["completions/clipped_ratio"] == 0.5


def test_rollouts_that_were_not_played_have_no_length():
    stats = example_stats(lengths=[2, 4, 0, 0], truncated=[False, True, True, False], played=[True, True, False, False])
    assert [stats[f"completions/{which}_length"] for which in ("mean", "min", "max")] == [3, 2, 4]
    assert [stats[f"completions/{which}_terminated_length"] for which in ("mean", "min", "max")] == [2, 2, 2]
    assert stats["completions/clipped_ratio"] == 0.5


def test_rewards_under_both_names_leave_out_abstentions():
    stats = example_stats()
    for spelling in ("reward", "rewards"):
        assert stats[f"{spelling}/right/mean"] == 0.75
        assert stats[f"{spelling}/right/std"] == pytest.approx(0.5)  # sqrt((3 · 0.25² + 0.75²) / 3)
        assert stats[f"{spelling}/short/mean"] == pytest.approx(4 / 3)


def test_reward_is_the_weighted_sum_with_std_of_the_whole_batch():
    stats = example_stats()
    # totals 1, 0, 2, 2: mean 1.25, squared deviations 0.0625 + 1.5625 + 0.5625 + 0.5625 = 2.75
    assert stats["reward"] == 1.25
    assert stats["reward_std"] == pytest.approx(math.sqrt(2.75 / 3))


def test_groups_of_equal_rewards_are_counted():
    assert example_stats()["frac_reward_zero_std"] == 0.5
    assert example_stats(num_generations=4)["frac_reward_zero_std"] == 0.0
    equal = torch.full((4, 2), 0.1)
    assert example_stats(rewards_NF=equal)["frac_reward_zero_std"] == 1.0


def test_distinct_answers_within_groups_and_across_prompts():
    """Groups of two: (a, b) to the first prompt and (a, a) to the second; right are a and b."""
    likeness = [Keys(1, 10, 10), Keys(1, 20, 10), Keys(2, 10, 20), Keys(2, 10, 20)]
    stats = example_stats(likeness=likeness)
    assert stats["completions/distinct"] == 0.75  # of 1 and 1/2
    assert stats["completions/distinct_across_prompts"] == pytest.approx(2 / 3)  # a, b of a, b and a
    assert stats["completions/most_common"] == 0.75  # "a": one of two, and two of two
    assert stats["completions/most_common_reference"] == 0.5
    assert "completions/distinct_across_prompts" not in example_stats(
        likeness=[one._replace(prompt=1) for one in likeness]
    )


def test_the_most_common_answer_leaves_out_absent_rollouts_but_not_failed_ones():
    """Groups of two: (yes, absent) and (yes, yes); then (yes, failed) and (yes, yes)."""
    likeness = [Keys(1, 10, 10), Keys(1, None, 10, absent=True), Keys(2, 10, 20), Keys(2, 10, 20)]
    assert example_stats(likeness=likeness)["completions/most_common"] == 1.0
    likeness[1] = likeness[1]._replace(absent=False)
    assert example_stats(likeness=likeness)["completions/most_common"] == 0.75  # one of two, and two of two


def test_the_correlation_of_rewards_and_lengths_is_of_groups():
    """Totals (1, 0) and (2, 2), lengths (2, 4) and (6, 8): the second group has no say in the sign."""
    # centred: rewards ±0.5, 0, 0; lengths ∓1, ∓1: -1 / (sqrt(0.5) * sqrt(4))
    assert example_stats()["reward_length_correlation"] == pytest.approx(-1 / math.sqrt(2))


def test_a_step_has_values_of_its_own():
    log = MetricLog()
    log.add({"a": Mean(1.0, 1.0)})
    log.add({"a": Mean(9.0, 1.0)}, "eval")
    assert log.end_step() == {"a": 1.0}
    log.add({"a": Mean(3.0, 1.0)})
    assert log.end_step() == {"a": 3.0} and log.drain("train") == {"a": 2.0}


def test_a_window_includes_the_step_that_is_not_over():
    log = MetricLog()
    log.add({"a": Mean(1.0, 1.0)})
    log.end_step()
    log.add({"a": Mean(3.0, 1.0)})
    assert log.so_far("train") == {"a": 2.0} and log.state_dict()["windows"]["train"] == {"a": ["mean", 4.0, 2.0]}
    assert log.drain("train") == {"a": 2.0} and log.drain("train") == log.end_step() == {}


def test_terminated_lengths_are_zero_only_if_there_are_none():
    def stats(truncated):
        return rollout_batch_stats(
            lengths=[5, 7],
            truncated=truncated,
            rewards_NF=torch.zeros(2, 1),
            weights=torch.ones(1),
            names=["r"],
            num_generations=2,
        )

    log = MetricLog()
    log.add(stats([True, True]))
    assert log.drain("train")["completions/min_terminated_length"] == 0.0
    log.add(stats([True, True]))
    log.add(stats([False, True]))
    values = log.drain("train")
    assert [values[f"completions/{which}_terminated_length"] for which in ("mean", "min", "max")] == [5, 5, 5]


def test_a_function_that_always_abstains_has_no_metric():
    log = MetricLog()
    rewards = torch.tensor([[1.0, math.nan], [0.0, math.nan]])
    log.add(
        rollout_batch_stats(
            lengths=[1, 1],
            truncated=[False, False],
            rewards_NF=rewards,
            weights=torch.ones(2),
            names=["a", "b"],
            num_generations=2,
        )
    )
    values = log.drain("train")
    assert "rewards/b/mean" not in values and "rewards/b/std" not in values
    assert values["reward"] == 0.5


def test_adding_the_same_global_stats_twice_changes_nothing():
    stats = rollout_batch_stats(
        lengths=[2, 4],
        truncated=[False, True],
        rewards_NF=torch.tensor([[1.0], [0.0]]),
        weights=torch.ones(1),
        names=["r"],
        num_generations=2,
    )
    alone, first, second = MetricLog(), MetricLog(), MetricLog()
    for log in (alone, first, second):
        log.add(stats)
    assert two_processes(first, second) == alone.drain("train")
