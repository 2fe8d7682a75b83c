"""Texts of rollouts travel to the process that writes them, and to no other."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.support.launching import free_port
from tests.support.launching import run as launch
from tests.support.message_sizes import LONG

SCRIPT = Path(__file__).parents[2] / "support" / "message_sizes.py"


def test_texts_are_sent_to_the_first_process_alone(tmp_path):
    """The rollouts of two processes share a text of 50 kB, which is sent once; all that is compared has less."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launch([*launcher, str(SCRIPT), str(tmp_path)])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["rollouts"] >= 2 * len(LONG)
    assert all(size < len(LONG) for size in (first["off"], second["off"], second["rollouts"]))
    assert all(second[f"evaluation {record}"] < len(LONG) for record in ("off", "rollouts"))
    (table,) = (tmp_path / "rollouts" / "completions").glob("*.parquet")
    assert pq.read_table(table).column("solution").to_pylist() == [LONG] * 8
    assert not (tmp_path / "off" / "completions").exists()
