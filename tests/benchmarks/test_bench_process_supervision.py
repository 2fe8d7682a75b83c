"""The benchmark of process supervision: its task, its table, and a run of every kind in miniature."""

import pytest
from benchmarks.process_supervision import METHODS, answer, plot, rights, run, steps_to_master, table

A, B, C, D, END = 2, 3, 4, 5, 1


def test_the_answer_goes_on_with_the_alphabet():
    assert answer("d", 6) == "abcdab"
    assert rights([A, B, D, END], "abcd") == [True, True, False, False]
    assert rights([A, END], "abcd") == [True, False]


def test_a_task_is_learnt_after_five_right_steps_in_a_row():
    assert steps_to_master([0.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.0]) == 6
    assert steps_to_master([0.0, 1.0, 1.0, 1.0, 1.0]) is None  # mean 0.8
    assert steps_to_master([1.0] * 4) is None


def test_the_table_says_how_many_runs_have_learnt(tmp_path):
    found = {("outcome", 8): [[0.0] * 6, [1.0] * 6, [0.0, *[1.0] * 5]], ("steps", 8): [[1.0] * 6]}
    lines = table(found).splitlines()
    assert lines[2] == "| outcome | 5.5 (5 to 6, 2 of 3 runs) | 66.7% |"
    assert lines[4] == "| steps | 5 (5 to 5) | 100.0% |"
    plot(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_reward_runs(method, algorithm):
    found = run(method, length=4, seed=0, steps=2, learning_rate=1e-3, algorithm=algorithm)
    assert len(found["curve"]) == 2 and all(0 <= share <= 1 for share in found["curve"])
