"""The worked example of the records."""

import doctest

from covey.core import records


def test_the_worked_example_of_the_records_holds():
    assert doctest.testmod(records).failed == 0
