"""The examples of docs/integrations.md."""

import re
from pathlib import Path

import pytest

from tests.support import runs, tiny

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"


@pytest.mark.slow
def test_a_reward_without_weight_measures(tmp_path):
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[-1]
    names = {}
    exec(block.split("\n\n")[0], names)  # the function; the trainer's line leaves things out
    lone = runs.trainer(tmp_path, max_steps=1)
    lone.train()
    trainer = runs.trainer(
        tmp_path,
        parts={"reward_funcs": [runs.longer, names["brackets"]], "eval_dataset": tiny.rows(2)},
        reward_weights=[1.0, 0.0],
        per_device_eval_batch_size=4,
        max_steps=1,
    )
    trainer.train()
    assert runs.history(trainer, "reward") == runs.history(lone, "reward")
    assert 0 <= runs.history(trainer, "balanced")[0] <= 1
    assert trainer.evaluate()["eval_balanced"] == trainer.predict(tiny.rows(2)).metrics["test_balanced"]


def test_every_tracker_with_tables_is_on_the_page():
    from covey.observability.completions import TRACKERS

    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [name for name in TRACKERS if any(f"`{name}`" in row and "table" in row for row in rows)] == list(TRACKERS)
