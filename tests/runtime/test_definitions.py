"""Functions of training scripts are loaded without training again."""

import pickle
import subprocess
import sys

import pytest

from covey.runtime import isolation
from covey.runtime.definitions import RunsWhenLoaded, main_script, refuse_while_loading, script_of_run
from covey.runtime.import_path import resolve
from covey.runtime.isolation import FunctionWorker
from tests.support.launching import environment

SETUP = """
import re
from pathlib import Path

ran = Path({mark!r})
NUMBER = re.compile(r"\\d+")
WORDS = ["one"]
WORDS.append("two")

def helper(text):
    return len(NUMBER.findall(text)) + len(WORDS)

def f(completions, **kwargs):
    trainer = "a local name"
    return [helper(text) for text in completions]

f.weight = 2.0

def train():
    ran.write_text("trained")

class Trainer:
    def __init__(self, **kwargs):
        ran.write_text("made")
    def train(self):
        ran.write_text("trained")
"""
ENDS = {
    "trainer": "trainer = Trainer(reward_funcs=f)\ntrainer.train()\n",
    "main": "def main():\n    Trainer(reward_funcs=f).train()\n\nmain()\n",
    "another name": "def entry():\n    Trainer(reward_funcs=f).train()\n\nentry()\n",
    "loop": "for rate in (1, 2):\n    trainer = Trainer(rate=rate)\n    trainer.train()\n",
    "with": "with open(ran, 'w') as marks:\n    marks.write('x')\n",
    "try": "try:\n    trainer = Trainer()\nfinally:\n    done = True\n",
    "condition": "if len(WORDS):\n    Trainer().train()\n",
    "writes": "ran.write_text('x')\n",
    "program": "import subprocess\nsubprocess.run(['touch', str(ran)])\n",
    "exit": "import sys\nsys.exit(Trainer().train())\n",
    "expression": "result = [Trainer().train() for _ in range(2)]\n",
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    mark = tmp_path / "ran"

    def written(end, name="script_at_work.py"):
        (tmp_path / name).write_text(SETUP.format(mark=str(mark)) + end)
        return mark

    yield written
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:line .* runs something")
@pytest.mark.parametrize("form", ["script_at_work.py:f", "script_at_work:f"])
@pytest.mark.parametrize("end", ENDS)
def test_a_function_of_a_script_is_loaded_without_running_it(script, end, form):
    mark = script(ENDS[end])
    f = resolve(form, "reward")
    assert f(["1 2 x"]) == [2 + 2] and f.weight == 2.0  # two numbers and two words
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:line .* runs something")
@pytest.mark.parametrize("names", ["f", "*"])
def test_a_script_that_another_file_imports_is_not_run(script, tmp_path, names):
    mark = script(ENDS["trainer"])
    code = f"from script_at_work import {names}\n\ndef twice(c): return f(c) * 2\n"
    (tmp_path / "rewards_at_work.py").write_text(code)
    assert resolve("rewards_at_work.py:twice", "reward")(["7"]) == [3, 3] and not mark.exists()


def test_a_guarded_script_is_imported_as_it_is(script):
    mark = script("made = list(WORDS)\nif __name__ == '__main__':\n    Trainer().train()\n")
    assert resolve("script_at_work.py:made", "value", needs_call=False) == ["one", "two"] and not mark.exists()


def test_a_script_says_that_it_was_not_run(script):
    script(ENDS["trainer"])
    with pytest.warns(UserWarning, match="runs something"):
        resolve("script_at_work.py:f", "reward")


@pytest.mark.filterwarnings("ignore:line .* runs something")
def test_a_function_that_needs_the_trainer_is_refused(script):
    mark = script("trainer = Trainer()\n\ndef g(completions):\n    return trainer.state\n\ntrainer.train()\n")
    with pytest.raises(RunsWhenLoaded):
        resolve("script_at_work.py:g", "reward")
    assert resolve("script_at_work.py:f", "reward")(["1"]) == [3] and not mark.exists()


def test_no_trainer_is_made_while_a_file_is_imported(tmp_path):
    """Whatever the call is named, nothing is trained: a trainer refuses."""
    code = "from covey.runtime.definitions import refuse_while_loading as made\nmade('a trainer')\ndef f(): pass\n"
    (tmp_path / "hidden_run.py").write_text(code)
    with pytest.raises(RunsWhenLoaded):
        resolve(f"{tmp_path}/hidden_run.py:f", "reward")
    refuse_while_loading("a trainer")  # outside, it may be


@pytest.mark.filterwarnings("ignore:line .* runs something")
def test_a_worker_does_not_run_the_script(script):
    mark = script(ENDS["trainer"])
    worker = FunctionWorker(resolve("script_at_work.py:f", "reward"))
    try:
        assert worker.call({"completions": ["1 2"]}, 60.0)["result"] == [4] and not mark.exists()
    finally:
        worker.close()


@pytest.mark.filterwarnings("ignore:line .* runs something")
def test_names_of_a_script_are_listed_where_one_is_missing(script):
    script(ENDS["trainer"])
    with pytest.raises(ValueError, match="Trainer, f, helper, train"):
        resolve("script_at_work.py:g", "reward")
    assert pickle.loads(pickle.dumps(resolve("script_at_work.py:f", "reward")))(["1"]) == [3]


@pytest.mark.filterwarnings("ignore:.* trains, so the file was not run")
def test_the_script_of_a_run_is_not_run_whatever_it_calls(script, tmp_path):
    """`ignite` is no name that tells; the run has recorded which file was its script."""
    mark = script("def ignite():\n    train()\n\nbegin = ignite\nbegin()\n")
    with script_of_run(str(tmp_path / "script_at_work.py")):
        assert resolve("script_at_work.py:f", "reward")(["1 2"]) == [4] and not mark.exists()


@pytest.mark.filterwarnings("ignore:line .* runs something")
def test_another_file_is_judged_by_its_calls_all_the_same(script, tmp_path):
    """The main program may be one that starts training scripts."""
    mark = script(ENDS["trainer"], "started_at_work.py")
    with script_of_run(str(tmp_path / "script_at_work.py")):
        assert resolve("started_at_work.py:f", "reward")(["1 2"]) == [4] and not mark.exists()


def test_the_script_is_the_users_file_that_python_runs(script, tmp_path):
    script("from covey.runtime.definitions import main_script\nran.write_text(str(main_script()))\n")
    for command in (["script_at_work.py"], ["-m", "script_at_work"]):
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, env=environment())
        assert (tmp_path / "ran").read_text() == str(tmp_path / "script_at_work.py")
    assert main_script() is None  # pytest's is a library's


def test_a_worker_knows_the_script_of_the_run(script, tmp_path, monkeypatch):
    """The function stands in a module that imports the script for a helper, and the script ends in an odd call."""
    mark = script("def ignite():\n    train()\n\nbegin = ignite\nif 'begin' in globals():\n    begin()\n")
    (tmp_path / "rewards_at_work.py").write_text("from script_at_work import helper\ndef g(c): return [helper(c[0])]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(tmp_path / "script_at_work.py")
    monkeypatch.setattr(isolation, "main_script", lambda: path)
    with script_of_run(path):
        worker = FunctionWorker(resolve("rewards_at_work.py:g", "reward"))
    try:
        assert worker.call({"c": ["1 2"]}, 60.0)["result"] == [4] and not mark.exists()
    finally:
        worker.close()


def test_no_bytecode_is_written_beside_the_file(script, tmp_path):
    script("")
    resolve("script_at_work.py:f", "reward")
    assert not (tmp_path / "__pycache__").exists()
