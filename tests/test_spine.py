"""The size of what one reads: the reading order of docs/architecture.md, and the code that one step enters."""

import re
import sys
import threading
from pathlib import Path

from tests.support import runs

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"\| `([a-z_/]+\.py)` \| (\d+) \|")


def test_the_spine_has_at_most_2500_lines():
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text())
    lines = {name: len((ROOT / "src" / "covey" / name).read_text().splitlines()) for name, _ in rows}
    assert "trainer/trainer.py" in lines
    assert sum(lines.values()) <= 2500
    assert {name: stated for name, stated in rows if abs(int(stated) - lines[name]) > 10} == {}


def test_a_default_step_enters_45_files_and_420_functions(tmp_path):
    """Python 3.11 counts comprehensions as functions; later versions count fewer."""
    parts = {"train_dataset": [{"prompt": f"p{i}"} for i in range(8)], "reward_funcs": runs.digits}
    settings = {"gradient_accumulation_steps": 1, "gradient_checkpointing": True, "max_steps": 3}
    trainer, entered = runs.trainer(tmp_path, parts=parts, **settings), set()
    source, step = str(ROOT / "src" / "covey"), trainer.training_step

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(source):
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_code.co_name))

    def traced(*args, **kwargs):
        if trainer.state.global_step != 1:  # the first step has checks of its own
            return step(*args, **kwargs)
        sys.setprofile(note)
        threading.setprofile(note)
        try:
            return step(*args, **kwargs)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    trainer.training_step = traced
    trainer.train()
    files = {name for name, _, _ in entered}
    assert 30 < len(files) <= 45 and 300 < len(entered) <= 420
