"""Event loops on threads: results, errors, deadlines, and coroutines that block, spin or stop the loop."""

import asyncio
import contextlib
import gc
import sys
import threading
import time

import pytest

from covey.runtime.deadlines import MAX_STILL_RUNNING, CallTimeout, LateCalls, StillRunning
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import UserCodeError
from tests.support import forking, launching


@pytest.fixture
def thread():
    thread = LoopThread("covey-sampling", no_grad=True)
    yield thread
    thread.close(seconds=60.0)


async def current_loop():
    return asyncio.get_running_loop()


async def answer(value):
    await asyncio.sleep(0.01)
    return value


def test_coroutines_run_while_the_caller_goes_on(thread):
    first, second = thread.start(answer(1)), thread.start(answer(2))
    assert (thread.wait(second), thread.wait(first)) == (2, 1)


def test_all_coroutines_share_one_event_loop(thread):
    assert thread.run(current_loop()) is thread.run(current_loop())


def test_an_error_is_raised_where_its_result_is_awaited(thread):
    async def fail():
        raise ConnectionError("the server is gone")

    work = thread.start(fail())
    assert thread.run(answer(3)) == 3
    with pytest.raises(ConnectionError, match="the server is gone"):
        thread.wait(work)


def test_a_timeout_inside_the_coroutine_is_its_own_error(thread):
    async def late():
        raise TimeoutError("no answer within 3 s")

    with pytest.raises(TimeoutError, match="no answer within 3 s"):
        thread.run(late())


def test_closing_cancels_coroutines_and_lets_them_clean_up(thread):
    cleaned = []

    async def endless():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    work = thread.start(endless())
    thread.run(answer(0))
    assert thread.close(60.0)
    assert cleaned == [True] and work.cancelled()
    assert "covey-sampling" not in {other.name for other in threading.enumerate()}


def test_closing_a_blocked_loop_returns_at_its_deadline(thread):
    blocked, release = threading.Event(), threading.Event()

    async def blocks_the_loop():
        blocked.set()
        release.wait(600)

    thread.start(blocks_the_loop())
    assert blocked.wait(120)
    assert not thread.close(0.3)  # before the loop is released
    release.set()


def test_waiting_for_a_coroutine_of_a_closed_loop_raises(thread, monkeypatch):
    monkeypatch.setattr("covey.runtime.loop_thread.CLEANUP_SECONDS", 0.1)

    async def ignores_cancellation():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    work = thread.start(ignores_cancellation())
    thread.run(answer(0))
    running = thread._current.thread
    thread.close()  # with a limit, tasks have half of it to end
    running.join(60.0)
    assert not running.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        thread.wait(work)


def test_a_loop_that_is_blocked_beyond_a_deadline_is_left_behind(thread, monkeypatch):
    monkeypatch.setattr("covey.runtime.loop_thread.RESPONSE_SECONDS", 0.1)
    release = threading.Event()

    async def blocks_the_loop():
        release.wait(30)

    with pytest.raises(CallTimeout):
        thread.run(blocks_the_loop(), seconds=0.1)
    assert thread.run(answer(1), seconds=60.0) == 1
    release.set()


def test_a_late_coroutine_is_cancelled_and_the_loop_goes_on(thread):
    ended = []

    async def late():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    before = thread.run(current_loop())
    with pytest.raises(CallTimeout):
        thread.run(late(), seconds=0.1)
    assert thread.run(current_loop()) is before and ended == [True]


# ---- coroutines of users ---------------------------------------------------------------------------------------------


def wait_until(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


async def fine():
    await asyncio.sleep(0.05)
    return "fine"


async def exits():
    raise SystemExit(0)


async def starts_what_exits():
    asyncio.get_running_loop().create_task(exits())
    return await fine()


async def stops_the_loop():
    asyncio.get_running_loop().stop()
    return await fine()


async def spins():
    while True:
        pass


def call(loop, function, seconds):
    return loop.call(function, seconds, LateCalls("example"))


async def leave_behind(loop, function, late, began):
    """Call a function that blocks the loop, and give the call up once it has begun: `began()` is true then."""
    calling = asyncio.ensure_future(loop.call(function, 600.0, late))
    await asyncio.to_thread(wait_until, began)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize("hostile", [starts_what_exits, stops_the_loop])
def test_a_coroutine_that_stops_the_loop_stops_no_other(hostile):
    loop = LoopThread("covey-async-tools")

    async def both():
        return await asyncio.gather(call(loop, fine, 60.0), call(loop, hostile, 60.0))

    assert asyncio.run(both()) == ["fine", "fine"]


def test_system_exit_in_a_coroutine_is_its_error():
    with pytest.raises(UserCodeError) as raised:
        asyncio.run(call(LoopThread("covey-async-tools"), exits, 60.0))
    assert raised.value.text == "SystemExit: 0" and isinstance(raised.value.error, SystemExit)


@pytest.mark.slow
def test_a_spinning_coroutine_is_stopped_and_others_go_on():
    loop = LoopThread("covey-async-tools")

    async def both():
        spinning = asyncio.ensure_future(call(loop, spins, 0.2))
        other = await call(loop, fine, 60.0)
        await asyncio.wait({spinning})
        return other, spinning.exception(), await call(loop, fine, 60.0)

    before, late, after = asyncio.run(both())
    assert (before, type(late), after) == ("fine", CallTimeout, "fine")


@pytest.mark.slow
def test_several_spinning_coroutines_are_stopped():
    before, loop = threads(), LoopThread("covey-async-tools")

    async def several():
        spinning = [asyncio.ensure_future(call(loop, spins, 0.2)) for _ in range(3)]
        await asyncio.wait(spinning)
        return [one.exception() for one in spinning]

    assert [type(one) for one in asyncio.run(several())] == [CallTimeout] * 3
    wait_until(lambda: threads() <= before)


def threads():
    return {one for one in threading.enumerate() if one.name == "covey-async-tools"}


@pytest.mark.slow
def test_an_abandoned_loop_ends_when_it_is_no_longer_blocked():
    before, release = threads(), threading.Event()
    loop = LoopThread("covey-async-tools")

    async def blocks():
        release.wait()

    async def use():
        with pytest.raises(CallTimeout):
            await call(loop, blocks, 0.1)
        return await call(loop, fine, 60.0)

    assert asyncio.run(use()) == "fine"
    assert len(threads() - before) == 2
    release.set()
    wait_until(lambda: len(threads() - before) == 1)
    loop.close()
    wait_until(lambda: threads() <= before)


@pytest.mark.filterwarnings("ignore::covey.runtime.deadlines.LateCallWarning")
def test_a_function_that_blocks_every_loop_is_not_called_for_ever(monkeypatch):
    """Each call that blocks costs a loop until it returns: a bounded number of them, of this function alone."""
    monkeypatch.setattr("covey.runtime.loop_thread.RESPONSE_SECONDS", 0.02)
    before, release, late, others = threads(), threading.Event(), LateCalls("blocks"), LateCalls("fine")
    loop, called = LoopThread("covey-async-tools"), []

    async def blocks():
        called.append(1)
        release.wait()

    async def use():
        for number in range(MAX_STILL_RUNNING):
            await leave_behind(loop, blocks, late, lambda: len(called) > number)  # noqa: B023
        for _ in range(3):
            with pytest.raises(StillRunning):
                await loop.call(blocks, 0.02, late)
        return await loop.call(fine, 5.0, others)

    assert asyncio.run(use()) == "fine"
    assert len(called) == MAX_STILL_RUNNING and len(threads() - before) == MAX_STILL_RUNNING + 1
    release.set()
    wait_until(lambda: not late.is_full)
    asyncio.run(loop.call(blocks, 5.0, late))
    loop.close()
    wait_until(lambda: threads() <= before)


def test_a_blocking_task_counts_for_the_calls_under_way(monkeypatch):
    monkeypatch.setattr("covey.runtime.loop_thread.RESPONSE_SECONDS", 0.02)
    began, release, late = threading.Event(), threading.Event(), LateCalls("gathers", 1)
    loop = LoopThread("covey-async-tools")

    async def blocks():
        began.set()
        release.wait()

    async def gathers():
        await asyncio.gather(blocks())

    asyncio.run(leave_behind(loop, gathers, late, began.is_set))
    assert late.is_full
    release.set()
    wait_until(lambda: not late.is_full)
    loop.close()


@pytest.mark.slow
def test_a_loop_ends_with_the_last_reference_to_it():
    before = threads()
    loop = LoopThread("covey-async-tools")
    assert asyncio.run(call(loop, fine, 60.0)) == "fine"
    del loop
    gc.collect()
    wait_until(lambda: threads() <= before)


EXITS = """
import asyncio, sys, time, torch
from covey.runtime.deadlines import CallTimeout, LateCalls, WorkerThread
from covey.runtime.loop_thread import LoopThread

matrix = torch.randn(200, 200)

def multiply():
    while True:
        matrix @ matrix

async def multiply_for_ever():
    while True:
        matrix @ matrix
        await asyncio.sleep(0)

loop, worker, late = LoopThread("loop"), WorkerThread("worker"), WorkerThread("late")
loop.start(multiply_for_ever())
worker.submit(multiply)
try:
    late.call(multiply, 0.1, LateCalls("multiply"))
except CallTimeout:
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_with_calls_under_way_exits_in_order():
    """Python before 3.14 ends daemon threads by unwinding them, and aborts where it meets torch's frames."""
    ended = forking.run([sys.executable, "-c", EXITS], env=launching.environment(), timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
