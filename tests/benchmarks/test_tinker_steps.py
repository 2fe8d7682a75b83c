"""Tables of the tinker benchmark's two ways, side by side."""

from benchmarks.records import Records
from benchmarks.tinker import first_steps, same_random_numbers


def test_first_steps_are_compared_over_the_seeds_that_both_ways_have(tmp_path):
    """Seeds 1 and 2 of both ways, of which the shortest run has one step: .5 and .7 end against .4 and .6."""
    records = Records(tmp_path / "runs.jsonl")
    for part, seed, ended in (
        ("recipe", 1, [0.5, 0.9]),
        ("recipe", 2, [0.7, 0.9]),
        ("recipe", 3, [0.0]),
        ("grpo", 1, [0.4]),
        ("grpo", 2, [0.6, 0.9]),
    ):
        records.add(part=part, group=8, seed=seed, ended=ended, tokens=[3.0] * len(ended))
    _, _, ends, tokens = first_steps(records, 8).splitlines()
    assert ends.startswith("| 1 | ends in time | 0.60 | 0.50 | +0.10 ")
    assert tokens.startswith("| 1 | tokens | 3.00 | 3.00 | +0.00 ")
    assert first_steps(records, 16) == ""


def test_a_replay_is_compared_sum_by_sum(tmp_path):
    """Two sums of two steps: all alike in the first, one in the second; the run of another length has no partner."""
    records = Records(tmp_path / "runs.jsonl")
    records.add(part="recipe", group=8, seed=3, steps=2, shares=[[0.0, 0.25], [0.5, 0.5]])
    records.add(part="replay", group=8, seed=3, steps=2, shares=[[0.0, 0.25], [0.5, 0.75]])
    records.add(part="replay", group=8, seed=3, steps=1, shares=[[0.0, 0.25]])
    _, _, one = same_random_numbers(records, 8).splitlines()
    assert one.startswith("| 3 | 1 of 2 | 3 of 4 | 31.2% ")
    assert same_random_numbers(records, 16) == ""
