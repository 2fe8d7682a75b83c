"""Lengths, prompts and rewards of the measured work."""

import statistics

import pytest
from benchmarks.workloads import WARM_UP_TOKENS, WORDS, WORKLOADS, Workload, reward_for, rows


def by_words(text: str) -> dict[str, list[str]]:
    return {"input_ids": text.split()}


def by_letters(text: str) -> dict[str, list[str]]:
    return {"input_ids": list(text) if len(text) > 9 else ["one"]}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda w: w.name)
def test_a_step_is_64_completions(workload):
    assert workload.completions == 64
    assert len(workload.lengths(0)) == 64
    assert max(workload.lengths(0)) <= workload.longest


def test_lengths_depend_on_workload_and_step_alone():
    w3 = WORKLOADS["W3"]
    assert w3.lengths(3) == w3.lengths(3)
    assert w3.lengths(3) != w3.lengths(4)


def test_geometric_lengths_have_the_mean_of_the_capped_law():
    w3 = WORKLOADS["W3"]
    lengths = [length for step in range(200) for length in w3.lengths(step)]
    q = 1 - 1 / 48
    expected = (1 - q**256) / (1 - q)  # E min(L, cap) = sum over l < cap of P(L > l) = sum of q^l
    assert statistics.mean(lengths) == pytest.approx(expected, rel=0.03)
    assert min(lengths) >= 1


def test_prompts_are_exact_distinct_and_begin_with_a_warm_up():
    work = Workload("w", 20, 2, 4, 5, with_signal=2)
    made = rows(work, by_words, steps=3)
    assert [len(row["prompt"].split()) for row in made] == [WARM_UP_TOKENS] * 2 + [20] * 6
    assert [row["signal"] for row in made] == [True, False] * 4
    assert len({row["prompt"] for row in made}) == 8


def test_a_tokenizer_that_gives_other_lengths_is_refused():
    with pytest.raises(ValueError, match="rather than 8"):
        rows(Workload("w", 8, 1, 2, 5), by_letters, steps=1)


def test_rewards_differ_only_within_groups_with_signal():
    work = Workload("w", 8, 2, 4, 5, with_signal=2)
    signal = [True] * 4 + [False] * 4
    assert reward_for(work)(["text"] * 8, signal) == [0, 0.25, 0.5, 0.75, 0.5, 0.5, 0.5, 0.5]


def test_words_are_many_enough_for_distinct_prompts():
    assert len(set(WORDS.split())) > 90
