"""The reading order of docs/architecture.md: files that exist, with their lines, in an evening's length."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"\| `([a-z_/]+\.py)` \| (\d+) \|")


def test_the_spine_has_at_most_2500_lines():
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text())
    lines = {name: len((ROOT / "src" / "covey" / name).read_text().splitlines()) for name, _ in rows}
    assert "trainer/trainer.py" in lines
    assert sum(lines.values()) <= 2500
    assert {name: stated for name, stated in rows if abs(int(stated) - lines[name]) > 10} == {}
