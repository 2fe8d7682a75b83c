"""What belongs to the whole process, kept as it is while other people's code runs."""

import os
import warnings

import pytest
import torch

from covey.runtime.process_state import SurroundingsWarning, kept_surroundings


def state():
    return os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()


def test_what_was_changed_is_changed_back_and_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = state()
    with pytest.warns(SurroundingsWarning) as told, kept_surroundings():
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(before[2] + 1)
        torch.set_grad_enabled(not before[3])
    assert state() == before
    assert len(told) == 4
    assert f"the working directory was changed from {tmp_path} to /" in str(told[0].message)


def test_it_is_changed_back_when_something_fails_and_nothing_is_said_of_what_was_left_alone():
    with pytest.raises(ValueError), pytest.warns(SurroundingsWarning) as told, kept_surroundings():
        torch.set_default_dtype(torch.float64)
        raise ValueError
    assert len(told) == 1 and torch.get_default_dtype() is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kept_surroundings():
            pass


def test_a_directory_that_is_gone_is_no_reason_to_stop(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with pytest.warns(SurroundingsWarning), kept_surroundings():
        os.chdir("/")
        gone.rmdir()
    os.chdir(tmp_path)
