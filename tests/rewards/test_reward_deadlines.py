"""Nothing waits for ever: functions, coroutines and worker processes that hang."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.rewards import RewardSuite, RewardWarning
from covey.runtime.deadlines import (
    BackgroundLoop,
    DeadlineExceeded,
    ScriptWorker,
    WorkerFailed,
    call_with_deadline,
)


def sleeps():
    time.sleep(30)


def backtracks():
    re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter lock for minutes


def swallows():
    try:
        time.sleep(30)
    except Exception:  # what a cautious reward function does
        return 0.0


def timed(function):
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        function()
    return time.monotonic() - start


@pytest.mark.parametrize("hanging", [sleeps, backtracks, swallows])
def test_a_call_on_the_main_thread_is_interrupted(hanging):
    assert timed(lambda: call_with_deadline(hanging, 0.2)) < 2.0


def computes_and_catches_everything():
    while True:
        try:
            while True:
                pass
        except:  # noqa: E722 (the point)
            continue


def waits_and_catches_everything():
    while True:
        try:
            time.sleep(30)
        except BaseException:
            time.sleep(30)


def catches_everything_twice():
    while True:
        with contextlib.suppress(BaseException):
            computes_and_catches_everything()


@pytest.mark.parametrize(
    "stubborn", [computes_and_catches_everything, waits_and_catches_everything, catches_everything_twice]
)
def test_a_call_on_the_main_thread_ends_whatever_it_catches(stubborn, monkeypatch):
    monkeypatch.setattr("covey.runtime.main_thread_deadline.GRACE", 0.1)
    assert timed(lambda: call_with_deadline(stubborn, 0.2)) < 5.0


def test_interrupts_strike_nowhere_but_in_the_function(monkeypatch):
    """Calls that end at about their deadline: interrupts come before, at and after the end."""
    monkeypatch.setattr("covey.runtime.main_thread_deadline.GRACE", 0.001)
    until, ends = time.monotonic() + 1.0, set()
    while time.monotonic() < until:
        for seconds in (0.003, 0.006, 0.012, 0.024):
            end = time.monotonic() + 0.01

            def spin(end=end):
                while time.monotonic() < end:
                    pass

            try:
                call_with_deadline(spin, seconds)
                ends.add("in time")
            except DeadlineExceeded:
                ends.add("late")
    time.sleep(0.05)
    assert ends == {"in time", "late"}
    assert not [thread for thread in threading.enumerate() if thread.name == "covey-deadline"]


def test_a_call_on_another_thread_is_left_behind():
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(timed(lambda: call_with_deadline(sleeps, 0.2))))
    thread.start()
    thread.join(5)
    assert outcome and outcome[0] < 2.0


def test_a_call_in_time_returns_or_raises_what_the_function_does():
    assert call_with_deadline(lambda: 4, 5.0) == 4
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 / 0, 5.0)
    time.sleep(0.01)  # and nothing strikes afterwards


def test_functions_that_use_alarms_work_because_they_stay_on_the_main_thread(score):
    def uses_alarm(completions):
        assert threading.current_thread() is threading.main_thread()
        return [0.0] * len(completions)

    score(RewardSuite(uses_alarm), ["a"])


def test_hanging_functions_lose_their_samples_and_are_counted(score):
    def slow(completions):
        time.sleep(30)

    async def slow_async(completions):
        await asyncio.sleep(30)

    def fine(completions):
        return [1.0] * len(completions)

    suite = RewardSuite([slow, slow_async, fine], timeout=0.2)
    with pytest.warns(RewardWarning, match="did not score 2 of 2 samples within 0.2 s"):
        rewards, stats = score(suite, ["a", "b"])
    assert rewards == [[None, None, 1.0]] * 2
    assert [stats[f"rewards/{name}/timeouts"] for name in suite.names] == [2, 2, 0]
    assert stats["rewards/slow/failures"] == 0


def test_the_deadline_covers_the_search_for_the_failing_sample(score):
    def slow_alone(completions):
        if len(completions) > 1:
            raise KeyError("whole batch")
        if completions[0] == "hangs":
            time.sleep(30)
        return [1.0]

    with pytest.warns(RewardWarning):
        rewards, stats = score(RewardSuite(slow_alone, timeout=0.3), ["a", "hangs", "never tried"])
    assert rewards == [[1.0], [None], [None]]
    assert stats["rewards/slow_alone/timeouts"] == 2 and stats["rewards/slow_alone/failures"] == 0


def test_async_functions_run_at_the_same_time_as_one_another_and_as_sync_ones(score):
    async def first(completions):
        await asyncio.sleep(0.3)
        return [1.0]

    async def second(completions):
        await asyncio.sleep(0.3)
        return [2.0]

    def third(completions):
        time.sleep(0.3)
        return [3.0]

    start = time.monotonic()
    assert score(RewardSuite([first, third, second]), ["a"])[0] == [[1.0, 3.0, 2.0]]
    assert time.monotonic() - start < 0.6  # one after another would take 0.9 s


def test_a_coroutine_that_blocks_the_loop_does_not_block_the_next_batch(score, monkeypatch):
    monkeypatch.setattr("covey.rewards.suite.LOOP_GRACE", 0.1)
    blocked = [True]

    async def blocks(completions):
        if blocked.pop() if blocked else False:
            time.sleep(1.5)
        return [1.0]

    suite = RewardSuite(blocks, timeout=0.2)
    with pytest.warns(RewardWarning):
        assert score(suite, ["a"])[0] == [[None]]
    assert score(suite, ["a"])[0] == [[1.0]]


def test_the_event_loop_is_the_same_from_call_to_call():
    async def current():
        return id(asyncio.get_running_loop())

    loop = BackgroundLoop()
    assert loop.wait(loop.start(current()), 5.0) == loop.wait(loop.start(current()), 5.0)


ECHO = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(request.get("sleep", 0))
    if request.get("die"):
        sys.exit(1)
    print(json.dumps(request), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    worker = ScriptWorker(script)
    yield worker
    worker.close()


def test_a_worker_that_hangs_is_killed_and_its_late_answer_never_taken_for_the_next(echo):
    assert echo.ask({"n": 1}, 5.0) == {"n": 1}
    first = echo._process.pid
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
        echo.ask({"n": 2, "sleep": 1.0}, 0.2)
    assert echo.ask({"n": 3}, 5.0) == {"n": 3}
    assert echo._process.pid != first


def test_a_worker_that_dies_is_replaced(echo):
    with pytest.raises(WorkerFailed, match="died"):
        echo.ask({"die": True}, 5.0)
    assert echo.ask({"n": 1}, 5.0) == {"n": 1}


def test_a_worker_in_an_endless_expression_ends_when_its_run_is_killed(tmp_path: Path):
    script, started = tmp_path / "endless.py", tmp_path / "started"
    script.write_text(
        f"""
import json, os, re
print(json.dumps({{"ready": True}}), flush=True)
input()
open({str(started)!r}, "w").write(str(os.getpid()))
re.match("(a*)*b", "a" * 60)  # takes longer than anybody lives, and never lets another thread run
"""
    )
    run = f"from pathlib import Path; from covey.runtime.deadlines import ScriptWorker as W; W(Path({str(script)!r}))"
    process = subprocess.Popen([sys.executable, "-c", f"{run}.ask({{}}, 600.0)"])
    _within(60.0, lambda: started.exists() and started.read_text())
    process.kill()
    process.wait()
    _within(20.0, lambda: not _exists(int(started.read_text())))


def _within(seconds: float, condition: Callable[[], Any]) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_cannot_start_says_so(tmp_path: Path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match=r"broken\.py did not start"):
        ScriptWorker(script).ask({}, 5.0)
