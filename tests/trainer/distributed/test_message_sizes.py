"""Each process records its own rollouts; an export of completions sends texts to the first process alone."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from covey.observability.record_files import FOLDER, all_files, evaluation_files, read_rows
from tests.support.launching import free_port
from tests.support.launching import run as launch
from tests.support.message_sizes import LONG

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "support" / "message_sizes.py"


def test_texts_are_sent_to_the_first_process_alone(tmp_path):
    """The rollouts of two processes share a text of 50 kB, which is sent once; all that is compared has less."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launch([*launcher, str(SCRIPT), str(tmp_path)])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["exported"] >= 2 * len(LONG)
    assert all(size < len(LONG) for size in (first["recorded"], second["recorded"], second["exported"]))
    assert all(second[f"evaluation {kind}"] < len(LONG) for kind in ("recorded", "exported"))
    (table,) = (tmp_path / "exported" / "completions").glob("*.parquet")
    assert pq.read_table(table).column("solution").to_pylist() == [LONG] * 8
    assert not (tmp_path / "recorded" / "completions").exists()
    recorded = [read_rows(path) for path in all_files(tmp_path / "recorded" / FOLDER)]
    assert [row["data"]["solution"] for rows in recorded for row in rows] == [LONG] * 8
    (of_ranks,) = evaluation_files(tmp_path / "recorded" / FOLDER)["eval_own"].values()
    assert [len(read_rows(path)) for path in of_ranks] == [2, 2]
