"""Columns of rows that environments are given."""

from covey.rollout.environments.interface import accepted


def test_reset_is_not_given_what_a_table_filled_with_none():
    def reset(size, seed=3, options=None, **others):
        return None

    row = {"size": None, "seed": None, "options": {"a": 1, "b": None}, "note": None}
    given = accepted(reset, row)
    assert given == {"size": None, "options": {"a": 1}}  # an argument without a default has to get something
    assert given["options"]["b"] is None and given["options"].get("b", 2) == 2
