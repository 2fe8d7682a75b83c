"""Phases share time out without counting any twice."""

import pytest

from covey.observability.metrics import PhaseTimer


class Clock:
    """A clock that stands still unless moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_inner_phase_pauses_the_outer_one():
    clock = Clock()
    phases = PhaseTimer(clock)
    with phases("train"):
        clock.now += 1
        with phases("generate"):
            clock.now += 10
        clock.now += 2
    clock.now += 100  # outside any phase
    assert phases.drain() == {"train": 3.0, "generate": 10.0}


def test_the_same_phase_nested_counts_once():
    clock = Clock()
    phases = PhaseTimer(clock)
    with phases("score"):
        clock.now += 1
        with phases("score"):
            clock.now += 1
    assert phases.drain() == {"score": 2.0}


def test_all_of_an_evaluation_is_one_phase():
    clock, noticed = Clock(), []
    phases = PhaseTimer(clock, notice=noticed.append)
    with phases("evaluate"):
        clock.now += 1
        with phases("generate"):
            clock.now += 10
    with phases("train"):
        clock.now += 2
    assert phases.drain() == {"evaluate": 11.0, "train": 2.0}
    assert noticed == ["evaluate", "generate", "evaluate", "train"]  # where a process hangs is told apart


def test_draining_inside_a_phase_splits_its_time():
    clock = Clock()
    phases = PhaseTimer(clock)
    with phases("train"):
        clock.now += 1
        assert phases.drain() == {"train": 1.0}
        clock.now += 2
    assert phases.drain() == {"train": 2.0}
    assert phases.drain() == {}


def test_an_exception_closes_the_phase():
    clock = Clock()
    phases = PhaseTimer(clock)
    with pytest.raises(RuntimeError), phases("reward"):
        clock.now += 1
        raise RuntimeError
    clock.now += 5
    assert phases.drain() == {"reward": 1.0}


def test_each_phase_that_begins_or_goes_on_is_noticed():
    noticed: list[str] = []
    phases = PhaseTimer(notice=noticed.append)
    with phases("train"), phases("generate"):
        pass
    assert noticed == ["train", "generate", "train"]


def test_after_an_error_the_last_notice_tells_where_it_came_from():
    noticed: list[str] = []
    phases = PhaseTimer(notice=noticed.append)
    with pytest.raises(ValueError), phases("train"), phases("generate"):
        raise ValueError
    assert noticed == ["train", "generate"]
