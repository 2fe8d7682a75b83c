"""Completions of the same prompts early and late, and evaluations on record."""

import pytest

from covey.observability.pairs import pairs
from covey.observability.record_files import (
    FOLDER,
    evaluation_file,
    evaluation_files,
    file_name,
    files,
    read_metrics,
    read_run,
    write_table,
)
from tests.support import runs, tiny

PLAIN = {"prompt": "null", "steps": "{}", "columns": "{}", "calls": "{}", "finish": "stop", "image_files": []}


def write(folder, path, *rows):
    """Rows of prompt, completion and reward."""
    names = ("data", "completion", "reward/r")
    given = [(f'{{"prompt": "{prompt}"}}', f'"{text}"', reward) for prompt, text, reward in rows]
    columns = dict(zip(names, map(list, zip(*given, strict=True)), strict=True))
    write_table(folder / path, {**columns, **{name: [value] * len(rows) for name, value in PLAIN.items()}})


def shown(found):
    return [[None if row is None else (row["completion"], row["reward"]) for row in pair] for pair in found]


def test_pairs_are_first_answers_to_prompts_that_came_again(tmp_path):
    write(tmp_path, file_name(0, 0, 1), ("a", "a1", 0.0), ("b", "b1", 1.0), ("b", "b2", 1.0))
    write(tmp_path, file_name(1, 0, 1), ("z", "z1", 0.0))
    write(tmp_path, file_name(2, 0, 2), ("c", "c3", None))
    write(tmp_path, file_name(2, 1, 2), ("b", "b3", 1.0))
    assert shown(pairs(tmp_path, [2.0])) == [[("b1", 2.0), ("b3", 2.0)]]


def test_evaluations_come_before_rollouts_of_training(tmp_path):
    for step, answer in ((10, "old"), (20, "middle"), (30, "new")):
        write(tmp_path, evaluation_file("eval_a_1", step, 0, 1), ("a", answer, 1.0))
    for number in (0, 29):
        write(tmp_path, file_name(number, 0, 1), ("b", str(number), 0.0))
    assert [[row["completion"] for row in pair] for pair in pairs(tmp_path)] == [["old", "new"], ["0", "29"]]


def test_without_pairs_the_latest_stand_alone(tmp_path):
    assert pairs(tmp_path) == []
    write(tmp_path, file_name(0, 0, 1), ("a", "a1", None), ("b", "b1", 1.0))
    assert shown(pairs(tmp_path)) == [[None, ("a1", None)], [None, ("b1", 1.0)]]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "max_steps": 2}
EVALUATED |= {"save_strategy": "steps", "save_steps": 1, "per_device_eval_batch_size": 4}


def steps_of(folder):
    return {name: [*steps] for name, steps in evaluation_files(folder).items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:output_dir")
def test_a_new_run_puts_earlier_evaluations_aside_and_keeps_its_own(tmp_path):
    parts = {"eval_dataset": {"held/out": tiny.rows(2)}}
    runs.trainer(tmp_path, parts=parts, **EVALUATED).train()
    assert steps_of(tmp_path / FOLDER) == {"eval_held-out": [0, 1, 2]}
    again = {**EVALUATED, "max_steps": 1}
    runs.trainer(tmp_path, parts=parts, **again).train()
    assert steps_of(tmp_path / FOLDER) == {"eval_held-out": [0, 1]} and len(files(tmp_path / FOLDER)) == 1
    assert steps_of(tmp_path / "record_1") == {"eval_held-out": [0, 1, 2]}


@pytest.mark.slow
def test_a_resumed_run_replaces_later_evaluations(tmp_path):
    parts = {"eval_dataset": tiny.rows(2)}
    runs.trainer(tmp_path, parts=parts, **{**EVALUATED, "max_steps": 3}).train()
    resumed = runs.trainer(tmp_path, parts=parts, **{**EVALUATED, "eval_on_start": False})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert steps_of(tmp_path / FOLDER) == {"eval": [0, 1, 2]}


def test_an_evaluation_alone_is_described(tmp_path):
    runs.trainer(tmp_path, parts={"eval_dataset": tiny.rows(2)}, per_device_eval_batch_size=4).evaluate()
    assert steps_of(tmp_path / FOLDER) == {"eval": [0]} and read_run(tmp_path)["processes"] == 1


@pytest.mark.slow
def test_an_evaluation_before_the_first_step_is_among_the_metrics(tmp_path):
    parts = {"eval_dataset": tiny.rows(2)}
    runs.trainer(tmp_path, parts=parts, **EVALUATED).train()
    lines = read_metrics(tmp_path / "record")
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 1, 2]
    assert len({line["config"] for line in lines}) == 1
