"""The table of the first hour's seeds."""

import doctest

from benchmarks import first_hour


def test_the_table_has_shares_intervals_and_minutes():
    assert doctest.testmod(first_hour).failed == 0


def test_no_constant_answer_is_right_twice():
    assert first_hour.best_constant() == 0.01
