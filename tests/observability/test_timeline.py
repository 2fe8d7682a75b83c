"""What ran beside what: spans within the latest rollout batch, and how much of one lay beside another."""

import doctest

import pytest

from covey.observability import metrics as module
from covey.observability.metrics import BINS, ROLLOUTS, TRAINER, PhaseTimer, Timeline, covered, drawn


def test_examples():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("spans", "until", "seconds"),
    [
        ([], 10.0, 0.0),
        ([(1.0, 2.0), (4.0, 5.0)], 10.0, 2.0),
        ([(1.0, 9.0), (2.0, 3.0)], 10.0, 8.0),  # one within another counts once
        ([(4.0, 6.0), (1.0, 5.0)], 10.0, 5.0),  # in any order
        ([(1.0, 9.0), (12.0, 13.0)], 4.0, 3.0),  # what comes later does not count
    ],
)
def test_covered_time_counts_once(spans, until, seconds):
    assert covered(spans, until) == seconds


def test_phases_arrive_with_inner_ones_cut_out():
    now = [0.0]
    timeline = Timeline()
    timeline.begin(0.0)
    phases = PhaseTimer(lambda: now[0], span=timeline.phase)
    with phases("train"):
        now[0] = 1.0
        with phases("generate"):
            now[0] = 3.0
        now[0] = 4.0
        phases.drain()  # a log in the middle of a phase does not cut it
        now[0] = 6.0
    timeline.begin(6.0)
    assert timeline.spans(TRAINER) == [("train", (0.0, 1.0)), ("generate", (1.0, 3.0)), ("train", (3.0, 6.0))]


def test_the_window_is_the_latest_complete_rollout_batch():
    timeline = Timeline()
    assert timeline.window() is None
    for began in (0.0, 10.0, 20.0):
        timeline.begin(began)
    timeline.add("judge", "", [(8.0, 12.0), (15.0, 16.0), (19.0, 25.0), (21.0, 22.0)])
    assert timeline.window() == (10.0, 20.0)
    assert timeline.spans("judge") == [("", (10.0, 12.0)), ("", (15.0, 16.0)), ("", (19.0, 20.0))]


def test_spans_of_earlier_rollout_batches_are_dropped():
    timeline = Timeline()
    for began in range(100):
        timeline.begin(began)
        timeline.add(TRAINER, "train", [(began + 0.1, began + 0.5), (began + 0.6, began + 0.9)])
    assert len(timeline._lanes[TRAINER]) == 6  # of this one and two before


def test_before_the_first_rollout_batch_the_window_is_what_there_is():
    timeline = Timeline()
    timeline.begin(5.0)
    timeline.add(TRAINER, "generate", [(5.0, 9.0)])
    assert timeline.window() == (5.0, 9.0)


def test_overlaps_add_up_until_they_are_drained():
    timeline = Timeline()
    timeline.overlap("reward", 1.0)
    timeline.overlap("reward", 0.5)
    assert timeline.drain() == {"reward": 1.5} and timeline.drain() == {}


def test_what_is_drawn_is_in_parts_of_equal_length():
    timeline = Timeline()
    assert drawn(timeline) is None
    timeline.begin(100.0)
    timeline.add(TRAINER, "generate", [(100.0, 104.0)])
    timeline.add(TRAINER, "train", [(104.5, 106.0)])
    timeline.add(ROLLOUTS, "", [(100.0, 102.0), (100.0, 104.0)])
    timeline.add("judge", "", [(102.0, 102.001), (105.0, 106.0)])
    found = drawn(timeline)
    assert found["seconds"] == 6.0 and found["parts"] == BINS == 480  # 80 parts in a second
    assert found["phases"] == [("generate", 0, 320), ("train", 360, 480)]
    assert found["rollouts"] == [2] * 160 + [1] * 160 + [0] * 160
    assert found["rewards"] == {"judge": [(160, 161), (400, 480)]}  # a short call has a part
