"""A library's pool of processes in place of Covey's workers: `pip install pebble; python -m benchmarks.process_pools`.

Each function of `tests/rewards/hostile_rewards.py` runs in a `pebble.ProcessPool` with a deadline, in a process of its
own. A promise of Covey's workers (docs/survival.md) is broken where no reward comes, or a wrong one; where the answer
comes later than two seconds after the deadline; where the next call fails; where the process that owns the pool ends or
hangs; or where a process is left behind. Functions that need a limit of memory are left out: pebble has none.
"""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.rewards import hostile_rewards as functions

DEADLINE, LATE, HANGS = 0.3, 2.0, 25.0  # seconds
NEED_LIMITS = {"allocates 4 GB", "leaks", "leaks in a child"}
MARK = "COVEY_POOL_MARK"


def main() -> None:
    names = [name for name in {**functions.NO_REWARD, **functions.HARMLESS} if name not in NEED_LIMITS]
    broken = 0
    for name in names:
        why = try_one(name)
        broken += bool(why)
        print(f"{name:36}{why or 'as promised'}", flush=True)
    print(f"{broken} of {len(names)} functions break a promise")


def try_one(name: str) -> str:
    """Run a case in a process that owns a pool; the promise that is broken, or nothing."""
    mark = f"{os.getpid()}-{abs(hash(name))}"
    command = [sys.executable, "-m", "benchmarks.process_pools", name]
    with tempfile.TemporaryFile() as output:  # not a pipe, which a process that is left behind would hold open
        owner = subprocess.Popen(
            command, env={**os.environ, MARK: mark}, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            owner.wait(HANGS)
        time.sleep(0.2)
        left = [one for one in marked(mark) if one != owner.pid]
        for one in {*left, owner.pid}:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        status = owner.wait()
        output.seek(0)
        printed = output.read().decode().strip()
    reasons = [] if printed else [f"the owner of the pool hung, or ended with {status}"]
    if printed:
        found = json.loads(printed.splitlines()[-1])
        if found["value"] != (1.0 if name in functions.HARMLESS else None):
            reasons.append(f"its reward is {found['value']}")
        if found["seconds"] > DEADLINE + LATE:
            reasons.append(f"it took {found['seconds']:.1f} s")
        if not found["next"]:
            reasons.append("the next call failed")
    return ", ".join([*reasons, *([f"{len(left)} processes are left"] if left else [])])


def marked(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in process.read_bytes().split(b"\0"):
                found.append(int(process.parent.name))
    return found


def call(name: str) -> list[float]:
    return functions.hostile([name], check_column)


def check_column(column: str, values: list) -> None:
    if len(values) != 1:
        raise ValueError(f"{len(values)} values for one completion")


def own_a_pool(name: str) -> None:
    from pebble import ProcessPool

    pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
    assert pool.schedule(call, args=["fine"]).result(HANGS) == [1.0]
    began, value = time.monotonic(), math.nan
    with suppress(BaseException):
        value = float(pool.schedule(call, args=[name], timeout=DEADLINE).result(8)[0])
    seconds, works = time.monotonic() - began, False
    with suppress(BaseException):
        works = pool.schedule(call, args=["fine"]).result(5) == [1.0]
    print(json.dumps({"value": None if math.isnan(value) else value, "seconds": seconds, "next": works}), flush=True)
    pool.stop()
    pool.join(3)
    os._exit(0)


if __name__ == "__main__":
    own_a_pool(sys.argv[1]) if len(sys.argv) > 1 else main()
