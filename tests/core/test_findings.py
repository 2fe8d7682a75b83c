"""Findings: how errors are named together, and that exceptions and warnings keep what they carry."""

import ast
import pickle
from pathlib import Path

import pytest

import covey
from covey.core.findings import CHECKED, CODES, STAGES, CheckError, CheckWarning, Finding
from covey.runtime.user_code import report

HOT = Finding.error("setting-range", "temperature=-1 is out of range.", "1.0 is usual.")
EMPTY = Finding.error("nothing-trained", "max_steps=0.")
IDLE = Finding.warning("setting-unread", "`top_k=0` has no effect.")


def test_every_code_has_a_stage_and_a_title():
    assert all(row.stage in STAGES and row.title for row in CODES.values())


def codes_in(file):
    """First arguments of `Finding.error`, `Finding.warning` and `CheckError.of`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            made_by = (getattr(node.func.value, "id", ""), node.func.attr)
            made = made_by in {("Finding", "error"), ("Finding", "warning"), ("CheckError", "of")}
            if made and isinstance(first := node.args[0], ast.Constant) and isinstance(first.value, str):
                yield first.value


@pytest.mark.slow
def test_checks_find_all_codes_of_the_table_and_no_others():
    source = Path(covey.__file__).parents[1]
    found = {
        code
        for package in ("covey", "covey_tools")
        for file in source.glob(f"{package}/**/*.py")
        for code in codes_in(file)
    }
    assert found - CODES.keys() == set()
    assert CHECKED.keys() - found == set()


def test_an_error_has_one_sentence_or_a_list_of_them():
    assert str(CheckError(HOT)) == "temperature=-1 is out of range. 1.0 is usual."
    assert str(CheckError(HOT, EMPTY)).splitlines()[1:] == [f"- {HOT.sentence}", "- max_steps=0."]
    assert CheckError(HOT, EMPTY).codes == ["setting-range", "nothing-trained"]


def test_errors_are_raised_together_after_the_warnings():
    with pytest.warns(CheckWarning) as caught, pytest.raises(ValueError) as raised:
        report([HOT, IDLE, EMPTY])
    assert raised.value.findings == (HOT, EMPTY)
    assert [warning.message.finding for warning in caught] == [IDLE]
    assert caught[0].filename == __file__


def test_nothing_is_raised_where_nothing_was_found(recwarn):
    report([Finding("template", "note", "", "")])
    assert not recwarn.list


def test_findings_survive_the_way_to_another_process():
    error, warning = CheckError(HOT, EMPTY), CheckWarning(IDLE)
    assert pickle.loads(pickle.dumps(error)).findings == error.findings
    assert pickle.loads(pickle.dumps(warning)).finding == type(warning)(*warning.args).finding == IDLE


def test_errors_of_a_part_name_it_once_each():
    named = CheckError(HOT, EMPTY).within("variant a")
    assert [one.evidence for one in named.findings] == [f"variant a: {one.evidence}" for one in (HOT, EMPTY)]
    assert named.codes == CheckError(HOT, EMPTY).codes
