"""Names of functions in files and modules."""

import pickle
import sys

import pytest

from covey.runtime.import_path import is_reference, resolve


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "references_tools.py").write_text("import json\n\ndef add(a, b):\n    return a + b\n\nNOTHING = 5\n")
    yield tmp_path
    sys.modules.pop("references_tools", None)


@pytest.mark.parametrize("text", ["references_tools.py:add", "references_tools:add", " references_tools.add "])
def test_three_forms_name_a_function(tools, text):
    assert resolve(text, "tool")(2, 3) == 5


def test_a_file_is_run_once_for_several_names(tools):
    path = tools / "references_tools.py"
    path.write_text("made = []\nmade.append(1)\n\ndef first(): return made\n\ndef second(): return made\n")
    first, second = (resolve(f"{path}:{name}", "tool") for name in ("first", "second"))
    assert first() is second() and first() == [1]


def test_a_file_that_raises_leaves_no_module_behind(tools):
    (tools / "references_broken.py").write_text("def add(a, b): return a + b\n\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ImportError, match=r"references_broken\.py cannot be imported: ZeroDivisionError"):
            resolve("references_broken.py:add", "tool")
    assert "references_broken" not in sys.modules


@pytest.mark.parametrize(
    ("code", "said"), [("import sys\nsys.exit(0)\n", "SystemExit: 0"), ("def add(a, b)\n", "line 1")]
)
def test_a_file_can_neither_end_the_run_nor_hide_its_error(tools, code, said):
    (tools / "references_ending.py").write_text(code)
    with pytest.raises(ImportError, match=r"references_ending\.py cannot be imported") as error:
        resolve("references_ending.py:add", "tool")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add", r"tool 'add' names no function. Write 'path/to/file.py:name', 'module:name' or 'module.name'"),
        ("nowhere.py:add", r"tool file '.*nowhere.py' does not exist"),
        ("references_tools.py:sub", r"'sub' does not exist. There: add\."),
        ("references_tools:NOTHING", r"'NOTHING' is not callable"),
        ("no_such_module:add", r"there is no module 'no_such_module'"),
    ],
)
def test_an_unusable_reference_says_why(tools, text, message):
    with pytest.raises(ValueError, match=message):
        resolve(text, "tool")


def test_a_value_is_found_with_needs_call_false(tools):
    assert resolve("references_tools:NOTHING", "setting", needs_call=False) == 5


def test_model_ids_are_no_references():
    assert not any(map(is_reference, ("org/model-1.5", "Qwen2.5-0.5B", "add", "C:/models", "")))


def test_files_of_one_name_are_modules_of_their_own(tmp_path):
    functions = []
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_one_name.py").write_text(f"def where():\n    return {folder!r}\n")
        functions.append(resolve(f"{tmp_path}/{folder}/of_one_name.py:where", "tool"))
    assert [pickle.loads(pickle.dumps(function))() for function in functions] == ["a", "b", "c"]
