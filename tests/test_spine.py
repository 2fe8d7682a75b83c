"""The size of what one reads: the reading order of docs/architecture.md, and the code that one step enters."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STEP_SIZE = ROOT / "tools" / "step_size.py"
ROW = re.compile(r"\| `([a-z_/]+\.py)` \| (\d+) \|")


def test_the_spine_has_at_most_2500_lines():
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text())
    lines = {name: len((ROOT / "src" / "covey" / name).read_text().splitlines()) for name, _ in rows}
    assert "trainer/trainer.py" in lines
    assert sum(lines.values()) <= 2500
    assert {name: stated for name, stated in rows if abs(int(stated) - lines[name]) > 10} == {}


@pytest.mark.slow
def test_a_default_step_enters_45_files_and_420_functions():
    """In a process of its own: Python 3.11 may hang where a profiler meets code that ran before."""
    done = subprocess.run([sys.executable, STEP_SIZE], capture_output=True, text=True, check=True)
    files, functions = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert 30 < files <= 45 and 300 < functions <= 420
