"""The benchmarks of teachers: what they measure, in miniature."""

import argparse
import doctest
from dataclasses import replace

import pytest
import torch
from benchmarks.workloads import WORKLOADS

from benchmarks import distillation, teacher_cost
from tests.support import tiny


def test_examples_in_the_text_hold():
    assert doctest.testmod(distillation).failed == 0
    assert doctest.testmod(teacher_cost).failed == 0


def test_costs_are_read_on_a_straight_line_between_evaluations():
    """60% lies halfway from 40% to 80%."""
    curve = [
        {"steps": 0, "tokens": 0, "flops": 0, "seconds": 0.0, "accuracy": 0.4},
        {"steps": 2, "tokens": 100, "flops": 1000, "seconds": 6.0, "accuracy": 0.8},
    ]
    expected = {"steps": 1, "tokens": 50, "flops": 500, "seconds": 3.0}
    assert distillation.reached(curve, 0.6) == pytest.approx(expected)
    assert distillation.reached(curve, 0.9) is None


def test_a_group_costs_its_passes():
    """A group that is sampled, scored once and trained by three passes has five times the operations of one."""
    size = distillation.ModelSize(body=10, head=5, layers=1, width=2)
    spent = distillation.Spent(size, lambda: 0.0, every=1)
    spent.add([(3, [2, 4])], [5])
    assert spent.tokens == 6 and spent.flops == 5 * distillation.forward_flops(size, 3, [2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("arm", distillation.TASK_ARMS)
def test_an_arm_of_two_tasks_is_trained(arm, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = distillation.tiny_llama(distillation.VOCABULARY)
    model.save_pretrained(tmp_path / "base-0")
    monkeypatch.setattr(distillation, "HELD_OUT", 4)
    options = argparse.Namespace(folder=tmp_path, steps=5, learning_rate=1e-3)
    found = distillation.task_run(arm, 0, options)
    assert [point["steps"] for point in found["curve"]] == [0, 5]
    assert distillation.task_table([{"arm": arm, **found}]).count("\n") == 2


@pytest.mark.slow
def test_the_cost_of_a_teacher_is_measured_against_a_forward_pass(tmp_path, monkeypatch):
    tiny.folder(tmp_path)
    monkeypatch.setattr(teacher_cost, "rows", lambda *args, **others: tiny.rows())
    monkeypatch.setattr(teacher_cost, "SCRIPTED", (4, 90))
    work = replace(WORKLOADS["W1"], groups=1, completion_tokens=4)
    found = teacher_cost.ratios(str(tmp_path), work, ["sampled token"], pairs=2, steps=3)
    ((of_teacher, of_training),) = found.values()
    assert len(of_teacher) == len(of_training) == 2 and min(of_teacher) > 0
    *_, difference = teacher_cost.memory(str(tmp_path), work)
    assert difference == "the difference: 0 bytes"
