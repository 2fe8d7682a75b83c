"""The first optimizer step tells what it took, and what was planned."""

import json
import re
from types import SimpleNamespace

import torch

from covey.observability.page.runs import RecordedRun
from covey.trainer.integrations.first_step import FirstStep
from tests.support import runs


def test_the_first_step_is_measured_and_no_other(tmp_path):
    said, state = [], SimpleNamespace(global_step=4)
    (tmp_path / "run.json").touch()
    callback = FirstStep(3 << 30, torch.device("cpu"), said.append, tmp_path)
    callback.on_step_end(None, state, None)
    assert not said  # it has not begun
    callback.on_train_begin(None, state, None)
    for step in (5, 6):
        callback.on_step_begin(None, state, None)
        state.global_step = step
        callback.on_step_end(None, state, None)
    (line,) = said
    assert re.fullmatch(
        r"first step: \d+\.\d s, at most .* of memory \(3\.0 GiB were planned, without libraries\)", line
    )
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["step"] == 5 and found["planned_bytes"] == 3 << 30 and found["peak_bytes"] > 1 << 20


def test_the_page_of_a_run_has_it(tmp_path):
    runs.trainer(tmp_path, max_steps=1).train()
    measured = RecordedRun(tmp_path).described()["measured"]
    assert measured["step"] == 1 and measured["seconds"] > 0
    assert 0 < measured["planned_bytes"] < measured["peak_bytes"]  # of a tiny model: the rest are libraries
