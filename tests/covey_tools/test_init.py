"""`covey init` writes a run that starts, and never over a file."""

import pytest

from covey.cli.explain.run import check_start
from covey.cli.main import main
from covey.cli.train import read_run
from covey_tools.init import FILES


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_the_written_run_would_start(tmp_path, monkeypatch, capsys, tiny_folder):
    assert main(["init", "new/my tickets"]) == 0
    assert "cd 'new/my tickets' && covey explain run.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "new" / "my tickets")
    run = read_run("run.yaml", ["--model", str(tiny_folder)], "grpo")
    start = check_start(run, run.args.algebra())
    assert (start.rows, start.problems, start.missing) == (200, [], [])


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "'.' holds run.yaml already" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert not any((tmp_path / name).exists() for name in FILES if name != "run.yaml")


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "notes").write_text("mine")
    assert main(["init", "notes"]) == 2
    assert "Name a folder" in capsys.readouterr().err
