"""Gates by eye: groups of four completions, and which of them are trained on."""

import math

import pytest

from covey.config.choosing import check_gates
from covey.data.gates import GroupFacts, gates_of

NAN = math.nan


def group(totals=(0.0, 1.0, 1.0, 0.0), advantages=(-1.0, 1.0, 1.0, -1.0), truncated=(), learned=(True,) * 4, row=None):
    return GroupFacts(
        row=row or {"prompt": "x"},
        rewards=[[total] for total in totals],
        totals=list(totals),
        advantages=[[value] for value in advantages],
        lengths=[3] * 4,
        truncated=[index in truncated for index in range(4)],
        learned=list(learned),
    )


def admits(given, *groups):
    gates = gates_of(given)
    return [all(gate(one) for gate in gates.values()) for one in groups]


def test_a_signal_is_an_advantage_that_something_is_learned_from():
    flat, unlearned = group(advantages=[0.0] * 4), group(advantages=[0, 0, 0, 2], learned=[True, True, True, False])
    assert admits({"signal": True}, group(), flat, unlearned) == [True, False, False]
    assert admits({"signal": False}, flat) == [True]
    assert list(gates_of(None, dynamic_sample=True)) == ["signal"]
    assert not gates_of({"signal": False}, dynamic_sample=True)


@pytest.mark.parametrize(
    ("bounds", "admitted"),
    [
        ({"above": 0, "below": 1}, [False, True, False, False]),  # strictly between
        ({"from": 0, "to": 1}, [True, True, True, False]),
        ({"above": 0.5}, [False, False, True, False]),
        ({"from": 0.5}, [False, True, True, False]),
    ],
)
def test_ranges_of_the_mean_reward(bounds, admitted):
    totals = [(0.0,) * 4, (0.0, 1.0, NAN, NAN), (1.0,) * 4, (NAN,) * 4]  # means 0, 1/2, 1 and none
    assert admits({"reward_range": bounds}, *(group(one) for one in totals)) == admitted


def test_advantages_within_a_range_are_rejected():
    small = group(advantages=[-0.1, 0.1, 0.0, 0.0])
    assert admits({"advantage_range": [-0.1, 0.1]}, small, group()) == [False, True]
    assert admits({"advantage_range": [0, 0]}, small, group(advantages=[0.0] * 4)) == [True, False]


def test_a_share_of_truncated_completions():
    assert admits({"max_truncated": 0.5}, group(), group(truncated=[0, 1]), group(truncated=[0, 1, 2])) == [
        *[True, True, False]
    ]


def test_functions_and_all_gates_together():
    def prefers_x(facts):
        return facts.row["prompt"] == "x"

    gates = {"mine": prefers_x, "max_truncated": 0}
    assert admits(gates, group(), group(row={"prompt": "y"}), group(truncated=[0])) == [True, False, False]


def test_a_function_that_fails_is_named():
    with pytest.raises(ValueError, match="mine"):
        admits({"mine": lambda facts: facts.nothing}, group())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"signal": 1}, "setting-type"),
        ({"reward_range": {}}, "setting-type"),
        ({"reward_range": {"over": 1}}, "setting-word"),
        ({"advantage_range": [1, 0]}, "setting-range"),
        ({"max_truncated": 1.0}, "setting-range"),
        ({"signals": True}, "setting-word"),
        (["signal"], "setting-type"),
    ],
)
def test_gates_that_cannot_work(given, code):
    assert [one.code for one in check_gates(given)] == [code]


def test_gates_that_can():
    assert not list(check_gates({"signal": True, "reward_range": {"above": 0}, "mine": "file.py:f"}))
