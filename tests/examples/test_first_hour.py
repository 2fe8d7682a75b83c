"""docs/start.md, followed word by word in an empty folder with a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.notebook import NOTEBOOK, render

from covey.cli.init import FILES, contents

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
    assert made == ["tickets.csv", "rewards.py", "run.yaml", "ask.py"]


def test_covey_init_writes_the_files_of_the_page():
    shown = {name: content for _, name, content in steps(PAGE)}
    assert contents() == {name: shown[name] for name in FILES}


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
    assert {"model.safetensors", "summary.html", "curves.png", "evaluation.json"} <= set(os.listdir(output))
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
    text = NOTEBOOK.read_text().replace(MODEL, str(tiny_folder)).replace("pip install covey", "true")
    notebook = nbformat.reads(text, as_version=4)
    (tmp_path / "tickets").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "tickets")}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert (tmp_path / "tickets" / "runs" / "tickets" / "evaluation.json").exists()
