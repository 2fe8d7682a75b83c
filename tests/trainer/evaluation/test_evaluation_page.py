"""docs/evaluation.md has every setting of an `EvalSuite`, and its first example gives the metrics it promises."""

import dataclasses
import re
from pathlib import Path

from covey import EvalSuite
from tests.support import runs, tiny

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"


def test_every_setting_is_on_the_page():
    rows = "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    assert not [field.name for field in dataclasses.fields(EvalSuite) if f"`{field.name}`" not in rows]


def test_the_first_example_evaluates(tmp_path):
    first, _, own, *_ = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if ">>>" not in block
    )
    settings = {**runs.DEFAULTS, "output_dir": str(tmp_path), "per_device_eval_batch_size": 4}
    rows = tiny.rows(4)
    names = {
        "model": tiny.folder(tmp_path / "model"),
        "settings": settings,
        "held_out": rows,
        "others": rows,
        "rows": tiny.rows(),
    }
    exec(first, names)
    promised = ["eval_sums_pass@1", "eval_hard_pass@16", "eval_hard_maj@16_low", "eval_plain_loss"]
    assert not [name for name in promised if name not in names["metrics"]]
    exec(own, names)
    assert names["right"](["The Answer: 4", "5"], answer=["4", "5"]) == [1.0, 0.0]
