"""Commands that read a run change no byte of its folder, and never run its script again."""

import contextlib
import io
import json
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import pytest

from covey.cli.main import main
from tests.support import faults, runs, tiny

SCRIPT = """
from pathlib import Path
from tests.support import runs, tiny

def f(completions, **kwargs):
    return [float(len(text) % 3) for text in completions]

if Path("begun").exists():
    Path("ran_again").touch()
Path("begun").touch()
trainer = runs.trainer("run", parts={{"model": {model!r}, "reward_funcs": f}}, max_steps=3, record="tokens")
trainer.train()
trainer.save_model()
"""
COMMANDS = {
    "doctor": ["doctor", "run", "--seconds", "8"],
    "diff": ["diff", "run", "run"],
    "view": ["view", "run", "--export", "page.html"],
    "replay": ["replay", "run"],
    "rewards": ["rewards", "test", "train_at_work.py:f", "--run", "run", "--limit", "4"],
    "explain": ["explain", "of_run.yaml"],
    "doctor of a run file": ["doctor", "of_run.yaml", "--seconds", "8"],
}


def hashes(folder):
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files(folder)}


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def covey(*words):
    """Exit status of a command, whatever it prints."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main(list(words))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a script without a main guard, the run that it has made, and a run file that names its reward."""
    folder = tmp_path_factory.mktemp("reading")
    model = tiny.folder(folder / "model")
    (folder / "train_at_work.py").write_text(SCRIPT.format(model=str(model)))
    with contextlib.chdir(folder):
        code = compile((folder / "train_at_work.py").read_text(), str(folder / "train_at_work.py"), "exec")
        space = {"__name__": "__main__", "__file__": str(folder / "train_at_work.py")}
        exec(code, space)
        faults.write(folder, str(model), max_steps=3, output_dir="run", record="rollouts")
        text = (folder / "run.yaml").read_text().replace(f"{folder}/rewards.py:right", "train_at_work.py:f")
        (folder / "of_run.yaml").write_text(text)
    assert (folder / "begun").exists() and not (folder / "ran_again").exists()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_reads_changes_no_byte(name, trained, monkeypatch):
    monkeypatch.chdir(trained)
    before, modules = hashes(trained / "run"), set(sys.modules)
    try:
        assert covey(*COMMANDS[name]) in (0, 1)
    finally:
        for new in set(sys.modules) - modules:
            if "at_work" in new:
                del sys.modules[new]
    assert hashes(trained / "run") == before
    assert not (trained / "ran_again").exists(), "the script was run again"


@pytest.mark.slow
def test_an_evaluation_of_a_model_is_written_beside_it(trained, monkeypatch):
    """The run file's output_dir is another run's: nothing in it changes."""
    monkeypatch.chdir(trained)
    runs.trainer(trained / "other", max_steps=1).train()
    rows = trained / "held_out.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    settings = {"model": "model", "output_dir": "other", "reward_funcs": ["train_at_work.py:f"], "bf16": False}
    settings |= {"eval_dataset": str(rows), "max_completion_length": 4, "use_cpu": True}
    (trained / "eval.json").write_text(json.dumps(settings))
    before, of_run = hashes(trained / "other"), hashes(trained / "run")
    assert covey("eval", "eval.json", "--model", "run") == 0
    assert hashes(trained / "other") == before
    after = hashes(trained / "run")
    assert {name: after[name] for name in of_run} == of_run and not (trained / "ran_again").exists()
    assert json.loads((trained / "run" / "evaluation.json").read_text())["model"] == "run"
    assert {Path(name).parts[0] for name in after.keys() - of_run} <= {"evaluation.json", "record"}
