"""The source of every prompt: shares without chance, schedules, and rows of several data sets as one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data.sources import (
    UNIT,
    Shares,
    Source,
    Sources,
    SourceSettings,
    most_of_a_batch,
    parts_of_prompt,
    weight_at,
)

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=2, max_size=12)


def largest_debt(weights_of, prompts):
    """Largest number of prompts by which a source was off from its share after any prompt."""
    shares, worst = Shares(len(weights_of(0))), 0
    for prompt in range(prompts):
        shares.next(weights_of(prompt))
        worst = max(worst, *map(abs, shares.owed))
    return worst / UNIT


def test_5_to_2_to_1_is_exact_in_every_batch_of_eight():
    shares = Shares(3)
    batches = [shares.take(8, [5, 2, 1]) for _ in range(500)]
    assert batches[0] == [0, 0, 1, 0, 2, 0, 1, 0]
    assert {tuple(batch.count(source) for source in range(3)) for batch in batches} == {(5, 2, 1)}
    assert shares.owed == [0, 0, 0]


@pytest.mark.slow
@given(WEIGHTS)
def test_no_prefix_is_off_by_a_whole_prompt(weights):
    k = len(weights)
    assert largest_debt(lambda prompt: weights, 300) <= 1 - 1 / (2 * k - 2) + 1e-9  # Tijdeman's bound


def test_irrational_weights():
    assert largest_debt(lambda prompt: [1, math.sqrt(2), math.pi], 5000) <= 0.75


def test_taking_what_is_owed_most_would_be_off_by_more_than_a_prompt():
    """The reason for the deadlines, with six sources."""
    weights = [0.0153, 0.4281, 0.0153, 0.1135, 0.4139, 0.0139]
    owed, worst = [0.0] * 6, 0.0
    for _ in range(3000):
        owed = [debt + weight / sum(weights) for debt, weight in zip(owed, weights, strict=True)]
        chosen = max(range(6), key=owed.__getitem__)
        owed[chosen] -= 1
        worst = max(worst, *map(abs, owed))
    assert largest_debt(lambda prompt: weights, 3000) <= 0.9 < worst


@pytest.mark.slow
@given(WEIGHTS, st.integers(0, 2**32))
def test_changing_weights_stay_within_a_prompt(weights, seed):
    other = weights[1:] + weights[:1]

    def between(prompt):
        return [one + (two - one) * min(prompt / 200, 1) for one, two in zip(weights, other, strict=True)]

    assert largest_debt(between, 300) < 1


def test_continuing_from_what_is_owed_is_without_a_break():
    whole, first, second = Shares(3), Shares(3), Shares(3)
    weights = [1, math.sqrt(2), math.pi]
    expected = whole.take(100, weights)
    begun = first.take(37, weights)
    second.owed = list(first.owed)
    assert begun + second.take(63, weights) == expected


def test_a_source_of_weight_0_never_comes():
    assert 1 not in Shares(3).take(100, [2, 0, 1])


@given(WEIGHTS)
def test_parts_of_a_prompt_add_up(weights):
    assert sum(parts_of_prompt(weights)) == UNIT


def test_equal_weights_take_turns_for_ever():
    shares = Shares(3)
    assert shares.take(9, [1, 1, 1]) == [0, 1, 2] * 3 and shares.owed == [0, 0, 0]


def test_a_schedule_is_linear_between_its_points():
    schedule = [[10, 1.0], [20, 3.0], [40, 0.0]]
    assert [weight_at(schedule, step, 7) for step in (0, 10, 15, 20, 30, 99)] == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0]
    assert weight_at("rows", 5, 7) == 7.0 and weight_at(0.5, 5, 7) == 0.5


def sources(**weights):
    return Sources([Source(name, [{"prompt": name}] * 4, SourceSettings(weight=one)) for name, one in weights.items()])


def test_rows_of_all_are_one_dataset():
    both = Sources([Source("a", [{"prompt": "0"}]), Source("b", [{"prompt": "1"}, {"prompt": "2"}])])
    assert [row["prompt"] for row in both] == ["0", "1", "2"]
    assert [row["source"] for row in both] == ["a", "b", "b"]
    assert [both.of(number) for number in range(3)] == [0, 1, 1]
    assert both[-1] == both[2] and both[1:] == [both[1], both[2]]
    with pytest.raises(IndexError):
        both[3]


def test_a_source_fills_what_its_rows_have_not():
    settings = SourceSettings(environment="shop", chat_template_kwargs={"a": 1})
    rows = [{"prompt": "x"}, {"prompt": "y", "environment": "shop", "chat_template_kwargs": {"a": 2}}]
    both = Sources([Source("s", rows, settings)])
    assert both[0] == {"prompt": "x", "environment": "shop", "chat_template_kwargs": {"a": 1}, "source": "s"}
    assert both[1]["chat_template_kwargs"] == {"a": 2}


def test_weights_are_the_rows_unless_given():
    assert Sources([Source("a", [{}] * 3), Source("b", [{}])]).shares_at(0) == [0.75, 0.25]
    assert sources(a=[[0, 1], [10, 0]], b=1).shares_at(5) == [1 / 3, 2 / 3]


def test_the_most_that_a_batch_takes_of_a_source():
    assert most_of_a_batch(sources(a=5, b=2, c=1), 8, 100) == [5, 2, 1]
    assert most_of_a_batch(sources(a=1, b=1), 3, 100) == [2, 2]


def test_other_rows_have_another_digest():
    def digest(*prompts):
        return Source("a", [{"prompt": prompt} for prompt in prompts]).digest()

    assert digest("x", "y") == digest("x", "y") != digest("x", "z")
