"""Row numbers without end: passes, what is put off, and chances."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data.samplers import PromptStream


def test_an_epoch_takes_every_row_once_in_another_order():
    stream = PromptStream(50, seed=3, name="refills", shuffle=True)
    first, second = stream.take(50), stream.take(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_order_depends_on_seed_and_name_alone():
    def draw(seed, name):
        return PromptStream(50, seed, name, shuffle=True).take(50)

    assert draw(0, "refills") == draw(0, "refills")
    assert draw(0, "refills") != draw(1, "refills")
    assert draw(0, "refills") != draw(0, "prompts")


def test_avoided_rows_are_deferred_and_come_first_later():
    stream = PromptStream(5, seed=0, name="refills", shuffle=False)
    assert stream.take(2, avoid={0, 2}) == [1, 3]
    assert stream.take(3) == [0, 2, 4]


def test_avoided_rows_come_where_too_few_others_are_left():
    stream = PromptStream(3, seed=0, name="refills", shuffle=False)
    assert stream.take(2, avoid={0, 1}) == [0, 1]


@given(
    rows=st.integers(2, 12),
    asked=st.lists(st.tuples(st.integers(1, 12), st.sets(st.integers(0, 11))), max_size=8),
    cut=st.integers(0, 8),
)
def test_rows_are_distinct_avoid_given_ones_and_resume(rows, asked, cut):
    stream, resumed = (PromptStream(rows, seed=1, name="refills", shuffle=True) for _ in range(2))
    for number, (count, avoid) in enumerate(asked):
        if number == cut:
            resumed.load_state_dict(stream.state_dict())
        count, avoid = min(count, rows), {row for row in avoid if row < rows}
        taken = stream.take(count, avoid)
        assert len(set(taken)) == count
        assert rows - len(avoid) < count or not avoid & set(taken)
        if number >= cut:
            assert resumed.take(count, avoid) == taken


def test_rows_come_as_often_as_their_chances_say():
    chances = [1.0, 0.5, 0.1]
    stream = PromptStream(3, seed=0, name="prompts", shuffle=True, chance=chances.__getitem__)
    counts = Counter(stream.take(1)[0] for _ in range(4000))
    shares = [counts[row] / counts[0] for row in range(3)]
    assert shares == pytest.approx(chances, abs=0.05)


def test_another_dataset_is_refused():
    stream = PromptStream(3, seed=0, name="refills", shuffle=True)
    with pytest.raises(ValueError, match="a training dataset of 3 rows and this one has 4"):
        PromptStream(4, seed=0, name="refills", shuffle=True).load_state_dict(stream.state_dict())
