"""Training runs on two processes of which the last goes wrong in a chosen way, at its second rollout batch.

Usage: failing_processes.py OUTPUT SECONDS WAY... Every way has a folder of its name, with what each process wrote and,
in `statuses.json`, how it ended. The processes are forked from one that has everything imported, and no launcher ends
one for the other's sake.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.support import runs, tiny
from tests.support.launching import free_port

CALLS = []
WAYS = {
    "Trained on several processes, of which one failed": "returns nonsense",
    "Trained on several processes, of which one was killed": "is killed",
    "Trained on several processes, of which one took too long": "hangs",
    "Let processes go different ways, with callbacks of one process only for instance": "strays",
    "Trained on several processes, of which one failed while others were at work": "fails while the other is at work",
}
"""Headings of docs/troubleshooting.md, and the way to each."""


def goes_wrong(completions, **kwargs):
    """Scores the first rollout batch; then, on the last process, goes wrong. Nonsense ends a run at the third time."""
    CALLS.append(len(completions))
    if len(CALLS) > 1 and way == "fails while the other is at work" and os.environ["RANK"] == "0":
        time.sleep(600)
    if len(CALLS) > 1 and os.environ["RANK"] == "1":
        if way == "returns nonsense":
            return ["nonsense"] * len(completions)
        if way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hangs":
            time.sleep(600)
        if way == "fails while the other is at work":
            raise KeyboardInterrupt
        if way == "strays":
            trainer.collectives.meet("do something of its own")
    return runs.digits(completions)


def fork(port):
    """The rank, in one of two new processes; in the old one the statuses of both, once they have ended."""
    children = []
    for rank in ("0", "1"):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": str(port)}
            return rank, None
        children.append(child)
    return None, [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    output, seconds, *ways = sys.argv[1:]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    tiny.quick()
    for way in ways:
        folder = Path(output, way)
        folder.mkdir(parents=True)
        rank, statuses = fork(free_port())
        if rank is not None:
            break
        (folder / "statuses.json").write_text(json.dumps(statuses))
    else:
        sys.exit()
    trainer = runs.trainer(
        folder,
        parts={"reward_funcs": goes_wrong},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=4,
        ddp_timeout=int(seconds),
    )
    try:
        trainer.train()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        (folder / f"error_{rank}.txt").write_text("\n".join([f"{type(error).__name__}: {error}", *notes]))
        raise
