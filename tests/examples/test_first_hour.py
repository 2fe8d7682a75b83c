"""docs/start.md, followed word by word in an empty folder with a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_file_of_the_page_has_a_name():
    made = [name for language, name, _ in steps(PAGE) if language != "bash"]
    assert made == ["tickets.csv", "prepare.py", "rewards.py", "run.yaml", "ask.py"]


@pytest.mark.slow
def test_the_first_hour_ends_with_a_trained_model(tmp_path, tiny_folder):
    covey = tmp_path / "bin" / "covey"
    covey.parent.mkdir()
    covey.write_text(f"#!{sys.executable}\nfrom covey.cli.main import main\nraise SystemExit(main())\n")
    covey.chmod(0o755)
    folder = tmp_path / "tickets"
    folder.mkdir()
    path = os.pathsep.join([str(covey.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    said = []
    for language, name, content in steps(PAGE):
        if name:
            (folder / name).write_text(content.replace(MODEL, str(tiny_folder)))
        if language == "bash":
            commands = [line for line in content.splitlines() if not line.startswith(INSTALLS)]
            done = subprocess.run(
                ["bash", "-ec", "\n".join(commands)], cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
            said.append(done.stdout)
    output = folder / "runs" / "tickets"
    assert {"model.safetensors", "summary.html", "curves.png", "evaluation.json"} <= set(os.listdir(output))
    assert "pass@1" in said[-1]
    asked = subprocess.run([sys.executable, "ask.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
