"""A run's page is there while the run goes on, pairs what is a pair, and an interruption says how to go on."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from covey.trainer.integrations.report import RunReport, command, key_figures, resume_command
from tests.support import runs

pytestmark = pytest.mark.pages
SAVED = {"save_strategy": "steps", "save_steps": 1}


def test_key_figures_compare_the_ends_of_the_run():
    history = [{"step": i, "reward": float(i)} for i in range(1, 21)] + [{"step": 20, "train_runtime": 65.0}]
    assert key_figures(history) == {
        "Reward at first": 1.5,  # two of twenty logs: (1 + 2) / 2
        "Reward at last": 19.5,
        "Optimizer steps": 20,
        "Training time": "1m05s",
    }


class Interrupts(TrainerCallback):
    """Ctrl-C in the second step, once it was seen that the page of the first is there."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            assert "<svg" in (self.folder / "summary.html").read_text()
            assert (self.folder / "curves.png").exists()
            os.kill(os.getpid(), signal.SIGINT)


def test_pages_are_written_at_saves_and_ctrl_c_says_how_to_continue(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("COVEY_COMMAND", raising=False)
    callbacks = [Interrupts(tmp_path)]
    trainer = runs.trainer(tmp_path, parts={"callbacks": callbacks}, max_steps=4, logging_steps=1, **SAVED)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith("checkpoint-1 with: trainer.train(resume_from_checkpoint=True)")
    page = (tmp_path / "summary.html").read_text()
    assert "<th>seed</th>" in page and "<th>versions</th><td>covey " in page


def interrupted_report(folder):
    """The report of a run that a signal has ended in its second step."""
    state = SimpleNamespace(log_history=[{"step": 2}], global_step=2, max_steps=4, is_world_process_zero=True)
    parts = {
        "stop": SimpleNamespace(signal=None),
        "args": SimpleNamespace(output_dir=str(folder), save_strategy="steps"),
    }
    parts["checkpoints"] = SimpleNamespace(context=SimpleNamespace(earlier={"checkpoint-1", "checkpoint-9"}))
    return RunReport(SimpleNamespace(state=state, callback_handler=SimpleNamespace(callbacks=[]), **parts))


def test_a_run_goes_on_from_no_later_step_than_its_own(tmp_path, capfd, monkeypatch):
    """Checkpoints of an earlier run in the folder may be of later steps, or of earlier ones."""
    monkeypatch.delenv("COVEY_COMMAND", raising=False)
    (tmp_path / "checkpoint-1").mkdir()
    assert "checkpoint-" not in interrupted_report(tmp_path).farewell()
    for step in (2, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    way = f"trainer.train(resume_from_checkpoint='{tmp_path / 'checkpoint-2'}')"
    assert interrupted_report(tmp_path).farewell().endswith(f"checkpoint-2 with: {way}")


def test_a_run_that_saves_nothing_writes_no_page(tmp_path):
    runs.trainer(tmp_path, max_steps=1).train()
    assert not (tmp_path / "summary.html").exists()


@pytest.mark.slow
def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    for drawn in ("plot_curves", "plot_timeline"):
        monkeypatch.setattr(f"covey.trainer.integrations.report.{drawn}", lambda *given: None)
    (tmp_path / "summary.html").mkdir()
    trainer = runs.trainer(tmp_path, max_steps=1, **SAVED)
    with pytest.warns(UserWarning, match="the page of the run could not be written: IsADirectoryError"):
        trainer.train()


def test_the_command_to_go_on_is_the_one_that_was_given(monkeypatch):
    given = "covey grpo --config 'my run.yaml' --hub_token hf_x --resume_from_checkpoint auto --beta 0"
    monkeypatch.setenv("COVEY_COMMAND", given)
    assert command() == given.replace("hf_x", "...")
    assert (
        resume_command() == "covey grpo --config 'my run.yaml' --hub_token ... --beta 0 --resume_from_checkpoint true"
    )
    monkeypatch.delenv("COVEY_COMMAND")
    monkeypatch.setattr(sys, "argv", ["train.py", "--api_key", "secret", "--hub-token=secret", "--key"])
    assert command() == "python train.py --api_key ... --hub-token=... --key"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('--model_init_kwargs \'{"token": "hf_x", "dtype": "auto"}\'', "--model_init_kwargs '{dtype: auto}'"),
        ("--model_init_kwargs='{token: hf_x}'", "'--model_init_kwargs={}'"),
        ("--columns '{a: prompt}'", "--columns '{a: prompt}'"),
        ("--dataset https://me:S@host/rows.csv?token=S", "--dataset 'https://host/rows.csv?token=...'"),
        ("--peft '{r: 4, token: hf_x'", "--peft ..."),  # that cannot be read
        ("--agent 'env KEY=K a.py --api-key K'", "--agent 'env KEY=... a.py --api-key ...'"),
        ("--agent 'a.py --out \"b c\"'", "--agent 'a.py --out \"b c\"'"),
        ('--system_prompt "it\'s -- so"', "--system_prompt 'it'\"'\"'s -- so'"),
    ],
)
def test_mappings_of_the_command_are_shown_without_secrets(monkeypatch, given, shown):
    monkeypatch.setenv("COVEY_COMMAND", f"covey grpo {given}")
    assert command() == f"covey grpo {shown}"


@pytest.mark.parametrize("given", ["--resume '/a b/c d'", "--resume-from-checkpoint='a b'", "--resume"])
def test_the_command_to_go_on_has_one_folder(monkeypatch, given):
    monkeypatch.setenv("COVEY_COMMAND", f"covey grpo {given} --beta 0")
    assert resume_command() == "covey grpo --beta 0 --resume_from_checkpoint true"
