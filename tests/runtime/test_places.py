"""Errors of the user's code name the file and the line of it that failed."""

import asyncio
import json
import sys

import pytest

from covey.core.records import FinishReason, Rollout
from covey.rewards import RewardContext, RewardError, RewardSuite
from covey.rollout.tools.toolbox import Toolbox, ToolWarning
from covey.runtime.import_path import resolve
from covey.runtime.user_code import UserCodeError, place_of

SOURCE = '''
import json


def right(completions, **kwargs):
    return [worth(text) for text in completions]


def worth(text):
    return json.loads("{")["value"]


def look(word: str) -> str:
    """Look.

    Args:
        word: Any.
    """
    return word.missing
'''


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "placed.py").write_text(SOURCE)
    return lambda name: resolve(f"placed.py:{name}", "reward")


def caught(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error


def test_the_last_line_of_the_user_is_named_not_that_of_a_library(code):
    assert place_of(caught(code("right"), ["a"])) == " (placed.py, line 10)"


def test_errors_of_libraries_alone_have_no_place():
    error = caught(json.loads, "{")
    error.__traceback__ = error.__traceback__.tb_next  # without this file
    assert place_of(error) == ""


def test_an_error_of_a_user_is_wrapped_with_its_place(code):
    error = UserCodeError(caught(code("look"), "a"))
    assert error.place == " (placed.py, line 19)"
    assert error.text in str(error) and error.release().endswith(error.place)


@pytest.mark.parametrize("isolation", [None, "process"])
def test_rewards_name_the_line_also_in_another_process(code, isolation):
    suite = RewardSuite(code("right"), **({"isolation": isolation} if isolation else {}))
    rollouts = [Rollout([0], [1], [True], None, "a", FinishReason.STOP)] * 2
    with pytest.raises(RewardError) as error:
        suite([{"prompt": "p"}] * 2, rollouts, RewardContext(None, lambda *_: None, lambda *_: None))
    suite.close()
    assert "placed.py, line 10" in str(error.value)


def test_the_policy_is_not_told_the_place_of_a_tool_and_the_user_is_once(code):
    from covey.rollout.tools.calls import ToolCall

    toolbox = Toolbox([code("look")])
    with pytest.warns(ToolWarning) as warned:
        results = [asyncio.run(toolbox._execute(ToolCall("look", {"word": "a"}), 0)) for _ in range(2)]
        toolbox.warn_of_failures()
    assert ["placed.py, line 19" in str(one.message) for one in warned] == [True]
    assert all("placed.py" not in str(result.content) and "missing" in str(result.content) for result in results)


def test_a_file_that_is_no_python_has_its_line_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "syntax.py").write_text("def (:\n")
    with pytest.raises(ImportError) as error:
        resolve("syntax.py:right", "reward")
    assert str(error.value).count("line 1") == 1


def test_a_file_that_raises_names_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises.py").write_text("import os\n\nos.missing\n")
    with pytest.raises(ImportError, match=r"raises.py, line 3"):
        resolve("raises.py:right", "reward")
    assert "raises" not in sys.modules
