"""Errors, data and process state of users' code."""

import io
import os
import re
import signal
import warnings
from collections import Counter
from enum import StrEnum

import numpy as np
import pytest
import torch

from covey.runtime.user_code import (
    PlainCopies,
    ProcessStateWarning,
    _set_stop_handlers,
    call_all,
    format_error,
    preserve_process_state,
    unsaveable_part,
)


class Exits(Exception):
    def __str__(self):
        raise SystemExit(0)


def test_an_error_is_formatted_whatever_its_message_does():
    assert format_error(ValueError("no")) == "ValueError: no"
    assert format_error(ValueError()) == "ValueError"
    assert format_error(Exits()) == "Exits"
    assert format_error(ValueError("x" * 10_000)) == "ValueError: " + "x" * 500 + "..."


def copied(value):
    return PlainCopies().copy(value)


def test_containers_are_copied_deeply():
    value = {"a": [1, [2, {"b": {3}}]], "c": ([4], 5)}
    twin = copied(value)
    assert twin == value
    twin["a"][1][1]["b"].add(6)
    twin["a"].append(7)
    twin["c"][0].append(8)
    assert value == {"a": [1, [2, {"b": {3}}]], "c": ([4], 5)}


def test_an_object_is_copied_once_even_if_it_contains_itself():
    row = [["x"]]
    first, second = copied([row, row])
    assert first is second and first is not row
    knot = []
    knot.append(knot)
    twin = copied(knot)
    assert twin[0] is twin and twin is not knot


def test_other_objects_are_shared():
    class Strange(list):
        pass

    strange, thing = Strange([1]), object()
    twin = copied([strange, thing, range(3)])
    assert twin[0] is strange and twin[1] is thing


# ---- values of checkpoints ------------------------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


PLAIN = {"a": [1, 2.5, None, True, "é"], "b": ({1, 2}, {"c": []}), 3: torch.ones(2)}


def test_plain_values_survive_a_weights_only_checkpoint():
    assert unsaveable_part(PLAIN, "value") is None
    file = io.BytesIO()
    torch.save(PLAIN, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert back.pop(3).equal(torch.ones(2)) and back == {name: PLAIN[name] for name in "ab"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (object(), "value is a object"),
        ({"a": [1, np.float64(2.0)]}, r"value\['a'\]\[1\] is a float64"),
        ({"a": Colour.RED}, r"value\['a'\] is a Colour"),
        ({Colour.RED: 1}, "a key of value is a Colour"),
        ([{"b": Counter()}], r"value\[0\]\['b'\] is a Counter"),
        ((1, (2, PLAIN, print)), r"value\[1\]\[2\] is a builtin_function_or_method"),
    ],
)
def test_the_part_that_cannot_be_saved_is_named(value, expected):
    assert re.fullmatch(expected, unsaveable_part(value, "value"))


# ---- state of the process -------------------------------------------------------------------------------------------


def state():
    return os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()


def test_changed_settings_are_reverted_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = state()
    with pytest.warns(ProcessStateWarning) as caught, preserve_process_state():
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(before[2] + 1)
        torch.set_grad_enabled(not before[3])
    assert state() == before
    assert len(caught) == 4
    assert f"the working directory was changed from {tmp_path} to /" in str(caught[0].message)


def test_handlers_and_the_default_device_are_reverted():
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.warns(ProcessStateWarning, match="SIGTERM|device") as caught, preserve_process_state():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        torch.set_default_device("meta")
    assert len(caught) == 2
    assert signal.getsignal(signal.SIGTERM) == handler and torch.zeros(1).device.type == "cpu"


def test_closed_standard_streams_lead_to_nothing():
    held = os.dup(0)
    try:
        with pytest.warns(ProcessStateWarning, match="set of open standard streams"), preserve_process_state():
            os.close(0)
        assert os.path.samestat(os.fstat(0), os.stat(os.devnull))
    finally:
        os.dup2(held, 0)
        os.close(held)


def test_only_changes_are_reverted_also_after_an_error():
    with pytest.raises(ValueError), pytest.warns(ProcessStateWarning) as caught, preserve_process_state():
        torch.set_default_dtype(torch.float64)
        raise ValueError
    assert len(caught) == 1 and torch.get_default_dtype() is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with preserve_process_state():
            pass


def test_a_deleted_working_directory_does_not_raise(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with pytest.warns(ProcessStateWarning), preserve_process_state():
        os.chdir("/")
        gone.rmdir()
    os.chdir(tmp_path)


def test_a_handler_that_was_set_in_c_is_left_out(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: numbers.append(number))
    numbers = []
    _set_stop_handlers([None, signal.SIG_DFL])
    assert numbers == [signal.SIGTERM]


def test_all_steps_of_an_end_are_called_and_the_error_raised():
    called = []

    def fails():
        called.append("fails")
        raise OSError("a broken pipe")

    with pytest.raises(OSError, match="a broken pipe"):
        call_all(lambda: called.append(1), fails, lambda: called.append(2))
    assert called == [1, "fails", 2]
    with pytest.raises(OSError) as raised:
        call_all(fails, {}.popitem, lambda: called.append(3))
    assert called[-1] == 3 and "KeyError" in raised.value.__notes__[0]
