"""A run's page is there while the run continues, pairs what is a pair, and an interruption says how to continue."""

import base64
import gzip
import json
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from covey.observability.page.export import write_page
from covey.observability.page.runs import RecordedRun
from covey.trainer.integrations.report import RunReport, command, resume_command
from tests.support import records, runs

pytestmark = pytest.mark.pages


def chunk(folder, name):
    """A part of the data in `report.html`."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', (folder / "report.html").read_text(), re.DOTALL)[1])
    return json.loads(gzip.decompress(base64.b64decode(data[name])))


SAVED = {"save_strategy": "steps", "save_steps": 1}


class Interrupts(TrainerCallback):
    """Ctrl-C in the second step, once it was seen that the page of the first is there."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            assert [line["step"] for line in chunk(self.folder, "run/0")["metrics"]] == [1]
            assert (self.folder / "curves.png").exists()
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_pages_are_written_at_saves_and_ctrl_c_says_how_to_continue(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("COVEY_COMMAND", raising=False)
    callbacks = [Interrupts(tmp_path)]
    settings = {"max_steps": 4, "logging_steps": 1, "draw_curves": True, **SAVED}
    trainer = runs.trainer(tmp_path, parts={"callbacks": callbacks}, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith("checkpoint-1 with: trainer.train(resume_from_checkpoint=True)")
    described = chunk(tmp_path, "run/0")["described"]
    assert described["provenance"]["seed"] == 42 and described["provenance"]["versions"].startswith("covey ")
    assert described["changed"]["max_steps"] == 4 and "beta" not in described["changed"]


def test_pages_do_not_grow_with_the_run(tmp_path):
    """Of many rollout batches every second, fourth, ... is listed, and the last; of these the latest have texts."""
    records.write(tmp_path, steps=12, prompts=1, size=2, length=8, tokens=False)
    path, run = tmp_path / "report.html", RecordedRun(tmp_path)
    assert write_page(path, [run]) == (0, 0)
    size = len(run.packed_blocks(["0.0"])["0.0"])
    left_out = write_page(path, [run], max_bytes=2 * 5 * 1.2 * size, most_texts=0)
    listed = [key for key, _ in chunk(path.parent, "state")["runs"][0]["blocks"]]
    assert listed == ["0.0", "4.0", "8.0", "11.0"] and left_out.batches == 8
    assert chunk(path.parent, "state")["runs"][0]["left_out"] == 8
    few = chunk(path.parent, "blocks/0/11.0")
    assert few["columns"]["step"] == [12, 12] and path.stat().st_size < 150_000


def test_pages_have_some_lines_of_a_long_log(tmp_path):
    records.write(tmp_path, steps=9, prompts=1, size=2, length=8, tokens=False)
    lines = RecordedRun(tmp_path).described(most_lines=4)["metrics"]
    assert [(line["step"], line.get("event")) for line in lines] == [(1, None), (5, None), (9, None), (9, "end")]


def interrupted_report(folder):
    """The report of a run that a signal has ended in its second step."""
    state = SimpleNamespace(log_history=[{"step": 2}], global_step=2, max_steps=4, is_world_process_zero=True)
    parts = {
        "stop": SimpleNamespace(signal=None),
        "args": SimpleNamespace(output_dir=str(folder), save_strategy="steps", draw_curves=False),
    }
    parts["checkpoints"] = SimpleNamespace(earlier={"checkpoint-1", "checkpoint-9"})
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
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_page_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "report.html").mkdir()
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
