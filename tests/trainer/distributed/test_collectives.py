"""Processes that do not come, fail or die: the others say so, soon, and end."""

import json
import re
import sys
from pathlib import Path

import pytest

from covey.trainer.distributed.collectives import Collectives
from tests.support import forking
from tests.support.failing_processes import WAYS
from tests.support.launching import environment, free_port, once
from tests.support.launching import run as launch
from tests.support.mistakes.page import read

DOCS = Path(__file__).parents[3] / "docs"
SCRIPT = Path(__file__).parents[2] / "support" / "failing_processes.py"


TOLD = {
    "returns nonsense": ["another process failed", "Rank 1 ended at step 3 with RewardError", "'nonsense'"],
    "is killed": ["the connection broke", "rank 1: step 1: reward"],
    "hangs": ["not every process came within 20 s", "rank 1: step 1: reward"],
    "fails while the other is at work": ["Rank 1 ended at step 1 with KeyboardInterrupt", "rank 0: step 1: reward"],
    "strays": ["rank 0: compare engine and trainer; rank 1: do something of its own"],
}


ESSENTIAL = ("returns nonsense", "is killed")
"""What every run of the tests tries; the others take longer, and are slow."""


@pytest.fixture(scope="module")
def went_wrong(tmp_path_factory):
    """(way) -> the folder of a run that went wrong so."""

    def run(way):
        ways = [one for one in WAYS.values() if (one in ESSENTIAL) == (way in ESSENTIAL)]
        command = [sys.executable, str(SCRIPT)]
        return once(tmp_path_factory, ways[0], lambda folder: launch([*command, str(folder), "20", *ways])) / way

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [pytest.param(row, id=way, marks=() if way in ESSENTIAL else pytest.mark.slow) for row, way in WAYS.items()],
)
def test_a_process_that_goes_wrong_ends_the_others_which_say_why(went_wrong, what):
    folder = went_wrong(WAYS[what])
    assert all(json.loads((folder / "statuses.json").read_text()))  # also the one that hangs: it is interrupted
    error = (folder / "error_0.txt").read_text()
    assert re.match("CollectiveError: step [13]: ", error)
    pieces = " ".join(read(DOCS)[what].split()).split("…")
    pattern = ".*?".join(re.escape(piece.strip()) for piece in pieces)
    assert re.search(pattern, error, re.DOTALL), "docs/troubleshooting.md has another message"
    for part in TOLD[WAYS[what]]:
        assert error.count(part) == 1


def test_one_process_exchanges_with_itself_and_keeps_its_errors():
    alone = Collectives(rank=0, size=1, seconds=1.0, step=lambda: 0)
    mine = object()
    assert alone.gather(mine, "look") == [mine]
    with pytest.raises(RuntimeError, match="gloo of my own"), alone.ending_all(), alone.together("fail"):
        raise RuntimeError("gloo of my own")


BEGINS_ANEW = """
import sys, time
import torch.distributed as dist
from covey.trainer.distributed import collectives
from covey.trainer.distributed.collectives import Collectives

collectives.WATCH_EVERY = collectives.PATIENCE = 0.1
dist.init_process_group("gloo")
rank = dist.get_rank()
processes = Collectives(rank, 2, 30.0, lambda: 0)
try:
    with processes.ending_all():
        raise ValueError("no checkpoint")
except ValueError:
    pass
with processes.ending_all():
    assert processes.gather(rank, "continue") == [0, 1]
    time.sleep(1.0)  # many looks
    processes.meet("end well")
if rank == 1:  # what comes after a stretch that ended well is still watched
    with processes.ending_all():
        raise KeyError("alone")
with processes.ending_all():
    time.sleep(20.0)
"""


@pytest.mark.slow
def test_processes_that_have_all_failed_may_begin_anew(tmp_path):
    script = tmp_path / "begins_anew.py"
    script.write_text(BEGINS_ANEW)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes, said = [], []
    for rank in ("0", "1"):
        with (tmp_path / f"errors_{rank}").open("w") as errors:
            command = [sys.executable, str(script)]
            processes.append(forking.Forked(command, env=environment(RANK=rank, **meeting), stderr=errors))
    try:
        for rank, process in enumerate(processes):
            process.wait(timeout=120)
            said.append((tmp_path / f"errors_{rank}").read_text())
        assert "KeyError: 'alone'" in said[1].splitlines()[-1]
        assert "CollectiveError: step 0: rank 0 of 2 was at work when another process failed." in said[0]
        assert "Rank 1 ended at step 0 with KeyError: 'alone'" in said[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


EXITS = """
import sys, threading, time
import torch, torch.distributed as dist
from covey.trainer.distributed import collectives

class Slow:
    def __del__(self):
        freeing.set()
        time.sleep(0.5)

collectives.EXIT_SECONDS = 2.0
freeing = threading.Event()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
processes = collectives.Collectives(0, 2, 10.0, lambda: 0)
tensor, sys.kept_alive = torch.ones(1), dist.group.WORLD
tensor.slow = Slow()
work = dist.all_reduce(tensor, async_op=True)
del tensor, work
assert freeing.wait(10.0)  # in gloo's thread
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_process_exits_well_while_gloo_frees_tensors(tmp_path):
    launch([sys.executable, "-c", EXITS, str(tmp_path / "store")])
