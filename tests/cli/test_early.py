"""Help, names and paths are checked before torch and transformers are imported."""

import ast
import json
import subprocess
import sys

import pytest
import yaml

from covey.cli.early import answer, names_in
from covey.cli.explain.flags import flag_parser
from covey.cli.main import COMMANDS, main

HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate")
CODE = """
import contextlib, io, json, sys
from covey.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code
    found.append([status, [name for name in json.loads(sys.argv[2]) if name in sys.modules]])
print(json.dumps(found))
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch, tiny_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rewards.py").write_text("def right(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    values = {"model": str(tiny_folder), "dataset": "rows.jsonl", "reward_funcs": ["rewards.py:right"]}
    (tmp_path / "run.yaml").write_text(yaml.dump(values))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_no_heavy_import_precedes_help_and_mistakes(run_file):
    mistakes = [
        ["grpo", "--config", "run.yaml", "--learning_rat", "1"],
        ["explain", "run.yaml", "--learning_rat", "1"],
        ["eval", "run.yaml", "--model", "no/such/folder"],
        ["grpo", "run.yaml", "--reward_funcs", "rewards.py:rigth"],
        ["diff", "a", "b"],
        ["replay", "a"],
        ["view", "a"],
        ["doctor", "a"],
        ["rewards", "test", "rewards.py:right", "--run", "a"],
    ]
    helps = [[name, "-h"] for name in COMMANDS]
    given = [json.dumps([*helps, *mistakes]), json.dumps(HEAVY)]
    done = subprocess.run([sys.executable, "-c", CODE, *given], cwd=run_file.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[0, []]] * len(helps) + [[2, []]] * len(mistakes)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "runs"], "runs"),
        (["--dataset", "row.jsonl"], "rows.jsonl"),
        (["--dataset", "reward.py:rows"], "rewards.py"),
        (["--eval_dataset", "{a: {dataset: row.jsonl}}"], "rows.jsonl"),
        (["--reward_funcs", "reward.py:right"], "rewards.py"),
        (["--reward_funcs", "rewards.py:rigth"], "right"),
        (["--tools", "rewards.py:look"], "look"),
        (["--environment_factory", "rewards.py:Room"], "Room"),
    ],
)
def test_a_misspelt_part_is_refused_by_name(run_file, flags, named, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ValueError, OSError)) as caught:
        answer("grpo", [str(run_file), *flags])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--no_shuffle_dataset"],
        ["--learning-rate=1e-5", "--max_steps", "-1"],
        ["--use_peft", "--lora_r", "8"],
        ["--model_name_or_path", "."],
        ["--kl_coef", "0.1"],
        ["--accelerate_config", "fsdp2", "--num_processes", "2"],
        ["--reward_funcs", "rewards.py:right", "accuracy_reward"],
    ],
)
def test_what_a_run_takes_passes(run_file, flags):
    assert answer("grpo", [str(run_file), *flags]) is None


def test_flags_of_explain_and_doctor_pass(run_file):
    for option in flag_parser()._option_string_actions:
        assert answer("explain", [str(run_file), option, "1"]) is None
    assert answer("doctor", [str(run_file), "--json", "--seconds", "1"]) is None
    with pytest.raises(ValueError, match="num_generations"):
        answer("doctor", [str(run_file), "--num_generatons", "4"])


def test_names_that_only_running_shows_are_not_refused():
    assert names_in(ast.parse("from rewards import *")) is None
    assert names_in(ast.parse("globals()['right'] = len")) is None
    assert {"a", "b", "c", "os", "d"} <= names_in(
        ast.parse("a = b = 1\nimport os.path\nfrom x import y as c\nclass d: 0")
    )


def test_an_unknown_key_of_the_file_is_one_line(run_file, capsys):
    run_file.write_text(run_file.read_text() + "num_generatons: 4\n")
    assert main(["grpo", "--config", str(run_file)]) == 2
    assert "num_generations" in capsys.readouterr().err
