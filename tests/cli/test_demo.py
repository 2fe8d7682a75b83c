"""The demo's own arithmetic: its data split and its interval."""

import pytest

from covey.cli import demo
from covey.cli.demo import HELD_OUT_PROMPTS, TimeBudget, clustered_interval, sums


def test_no_question_is_both_trained_on_and_held_out():
    pytest.importorskip("reasoning_gym")
    train, held_out = sums(seed=0)
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, held_out)]
    assert not questions[0] & questions[1]
    assert len(questions[0]) == len(train) and len(questions[1]) == len(held_out) == HELD_OUT_PROMPTS
    assert sums(seed=0)[1] == held_out and sums(seed=1)[1] != held_out


def test_answers_are_right():
    pytest.importorskip("reasoning_gym")
    for row in sums(seed=0)[0]:
        expression = row["prompt"][-1]["content"].split(":")[1].rstrip("= ")
        left, sign, right = expression.split()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)


def test_the_interval_is_wider_for_samples_that_agree():
    # 40 prompts, 4 samples each; in the first case samples of a prompt agree, so there are only 40 opinions.
    agreeing = [i % 2 == 0 for i in range(40) for _ in range(4)]
    mixed = [i % 2 == 0 for i in range(160)]
    wide, narrow = clustered_interval(agreeing, 4, seed=0), clustered_interval(mixed, 4, seed=0)
    assert wide[0] < 0.5 < wide[1] and wide[1] - wide[0] > 0.2
    assert narrow == [0.5, 0.5]  # every prompt is right half the time
    assert clustered_interval([True] * 8, 4, seed=0) == [1.0, 1.0]


def test_training_ends_when_the_time_is_up():
    class Control:
        should_training_stop = False

    control, budget = Control(), TimeBudget(seconds=1000)
    budget.on_train_begin(None, None, control)
    budget.on_step_end(None, None, control)
    assert not control.should_training_stop
    budget.start -= 1001
    budget.on_step_end(None, None, control)
    assert control.should_training_stop


def test_missing_packages_are_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PACKAGES", ("reasoning_gym", "not_there"))
    with pytest.raises(ImportError, match=r"needs reasoning_gym and not_there: pip install gguf reasoning-gym && pip"):
        demo.run(tmp_path / "out", seed=0, max_steps=1, minutes=1.0)
    assert not (tmp_path / "out").exists()
