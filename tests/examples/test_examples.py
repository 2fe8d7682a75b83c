"""Every example runs as it stands, on a tiny model and for two steps."""

import io
import json
import math
import runpy
import sys
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NEEDS = {
    "environment_gym.py": "gymnasium",
    "environment_openenv.py": "openenv",
    "environment_verifiers.py": "marble_v1",
    "hyperparameter_search.py": "optuna",
}
"""What an example needs beside Covey; `make test-environments` has all of it."""
LONG_PROMPTS = {"environment_verifiers.py", "tools.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")
WITHOUT_TRAINER = {"custom_loop.py", "study.py", "two_policies.py"}
ESSENTIAL = {
    *("quickstart_grpo.py", "custom_loss.py", "custom_advantage.py", "environment.py", "lora.py", "rollout_func.py"),
    "tools.py",
    *("environment_openenv.py", "environment_verifiers.py"),
}
"""What every run of the tests tries, one for each kind of argument, and what is installed in few places."""
EACH = [
    pytest.param(name, marks=() if name in ESSENTIAL else pytest.mark.slow)
    for name in SCRIPTS
    if name not in WITHOUT_TRAINER
]


def run(name, monkeypatch, *flags):
    """What `main()` of an example returns, called as its command line calls it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as `python examples/NAME.py` does
    monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
    return runpy.run_path(str(EXAMPLES / name))["main"]()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", EACH)
def test_every_example_trains(name, tiny_folder, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    model = tiny.folder(tmp_path / "wide", max_position_embeddings=4096) if name in LONG_PROMPTS else tiny_folder
    which = ["--tiny"] if name == "vlm.py" else ["--model", model]
    trainer = run(name, monkeypatch, *which, "--max_steps", 2, "--output_dir", tmp_path)
    assert trainer.state.global_step == 2
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses and all(loss == loss for loss in losses), "every logged loss is a number"
    assert list(tmp_path.rglob("generation_*.parquet")), "completions are on record"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_best_branches_of_trees_are_trained_on(tiny_folder, tmp_path, monkeypatch):
    flags = ["--model", tiny_folder, "--max_steps", 2, "--output_dir", tmp_path, "--train", "best"]
    trainer = run("tree_rollouts.py", monkeypatch, *flags)
    assert trainer.state.global_step == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_policies_play_each_other(tmp_path, monkeypatch):
    model = tiny.folder(tmp_path / "wide", max_position_embeddings=4096)
    flags = ["--model", model, "--max_steps", 2, "--output_dir", tmp_path / "duel"]
    study = run("two_policies.py", monkeypatch, *flags)
    assert {variant.status for variant in study.variants.values()} == {"finished"}
    assert {*study.variants["white"].evaluations} == {1, 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_is_trained_over_four_bits(tiny_folder, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    flags = ["--model", tiny_folder, "--max_steps", 2, "--output_dir", tmp_path, "--four_bits"]
    trainer = run("lora.py", monkeypatch, *flags)
    assert trainer.state.global_step == 2 and trainer.policy.get_base_model().is_quantized


@pytest.mark.slow
def test_a_loop_by_hand_changes_the_policy_as_its_rewards_say(tiny_folder, monkeypatch, tmp_path, capsys):
    history = run("custom_loop.py", monkeypatch, "--model", tiny_folder, "--max_steps", 2, "--output_dir", tmp_path)
    assert len(history) == 2 and all(entry["loss"] == entry["loss"] for entry in history)
    assert capsys.readouterr().out.count("reward") == 2


def test_an_advantage_of_ones_own_is_relative_to_the_median(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    above_median = runpy.run_path(str(EXAMPLES / "custom_advantage.py"))["above_median"]
    totals = torch.tensor([[0.0, 0.0, 1.0], [1.0, 2.0, math.nan]])
    # medians 0 and 1 (the lower one of two); the trainer gives a completion without a reward 0
    found = above_median(SimpleNamespace(totals=totals))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, math.nan]]), equal_nan=True)


def test_a_loss_of_ones_own_takes_less_than_twenty_lines():
    assert code_lines((EXAMPLES / "custom_loss.py").read_text()) < 20


def test_lines_of_code_leave_out_comments_and_docstrings():
    # 2 lines: the def and the return.
    assert code_lines('"""Title."""\n\n# why\ndef f(x):\n    """What."""\n    return x  # so\n') == 2


def test_every_example_is_listed_where_readers_look():
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "README.md").read_text()
    missing = [name for name in [*SCRIPTS, "run.yaml"] if f"examples/{name}" not in pages]
    assert not missing


def test_the_run_file_means_what_the_examples_share(monkeypatch):
    from covey.cli.config_file import load_run

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shared = runpy.run_path(str(EXAMPLES / "common.py"))
    described = load_run("examples/run.yaml")
    options = shared["parser"](None).parse_args([])
    for name, value in shared["settings"](options).items():
        if name not in ("output_dir", "report_to"):  # a place of its own; "none" becomes an empty list
            assert getattr(described.args, name) == value, name
    assert described.model == options.model
    assert [json.loads(line) for line in Path(described.dataset).read_text().splitlines()] == shared["SUMS"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_run_file_trains(tiny_folder, tmp_path, monkeypatch):
    from covey.cli.main import main

    monkeypatch.chdir(ROOT)
    flags = ["--model", tiny_folder, "--max_steps", "2", "--output_dir", str(tmp_path)]
    assert not main(["grpo", "--config", "examples/run.yaml", *flags])
    assert list(tmp_path.rglob("generation_*.parquet"))


def code_lines(source):
    """Lines that hold code: no comments, docstrings or blank lines."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines, line_is_empty = set(), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            line_is_empty = True
        if token.type in nothing:
            continue
        if not (token.type == tokenize.STRING and line_is_empty):  # a string that opens a statement is a docstring
            lines.update(range(token.start[0], token.end[0] + 1))
        line_is_empty = False
    return len(lines)
