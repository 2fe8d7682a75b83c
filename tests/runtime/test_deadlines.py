"""Calls under a deadline: functions that sleep, compute, backtrack and catch everything; threads that are stopped."""

import asyncio
import contextlib
import gc
import re
import threading
import time

import pytest
import torch

from covey.runtime import deadlines
from covey.runtime.deadlines import (
    MAX_STILL_RUNNING,
    CallTimeout,
    LateCalls,
    LateCallWarning,
    StillRunning,
    WorkerThread,
    torch_settings,
)


def call_with_deadline(function, seconds):
    return deadlines.call_with_deadline(function, seconds, LateCalls("example"))


def run_in_thread(function, seconds):
    return deadlines.run_in_thread(function, seconds, LateCalls("example"))


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
    with pytest.raises(CallTimeout):
        function()
    return time.monotonic() - start


@pytest.mark.parametrize("hanging", [sleeps, backtracks, swallows])
def test_a_call_on_the_main_thread_is_interrupted(hanging):
    assert timed(lambda: call_with_deadline(hanging, 0.2)) < 20.0


def computes_and_catches_three():
    for _ in range(3):
        with contextlib.suppress(BaseException):
            while True:
                pass
    while True:
        pass


def waits_and_catches_everything():
    while True:
        try:
            time.sleep(30)
        except BaseException:
            time.sleep(30)


def catches_and_answers():
    try:
        time.sleep(30)
    except BaseException:
        return 0.0  # no answer: the interrupt made it


@pytest.mark.parametrize("stubborn", [computes_and_catches_three, waits_and_catches_everything, catches_and_answers])
def test_a_main_thread_call_that_catches_an_interrupt_is_late_all_the_same(stubborn, monkeypatch):
    monkeypatch.setattr(deadlines, "INTERRUPT_INTERVAL", 0.05)
    assert timed(lambda: call_with_deadline(stubborn, 0.05)) < 20.0


def test_a_main_thread_call_that_no_interrupt_ends_is_reported(monkeypatch):
    monkeypatch.setattr(deadlines, "INTERRUPT_INTERVAL", 0.02)
    monkeypatch.setattr(deadlines, "BLOCKED_SECONDS", 0.1)
    caught = []

    def catches_everything():
        while len(caught) < 20:
            with contextlib.suppress(BaseException):
                try:
                    time.sleep(30)
                finally:
                    caught.append(True)

    with pytest.warns(LateCallWarning, match="example"):
        timed(lambda: call_with_deadline(catches_everything, 0.02))
    assert len(caught) == 20


@pytest.mark.slow
def test_interrupts_are_raised_only_in_the_function(monkeypatch):
    """Calls that end at about their deadline: interrupts come before, at and after the end."""
    monkeypatch.setattr("covey.runtime.deadlines.INTERRUPT_INTERVAL", 0.001)
    begun, ends = time.monotonic(), set()

    def spin():
        end = time.monotonic() + 0.01
        while time.monotonic() < end:
            pass

    while time.monotonic() < begun + (120.0 if len(ends) < 2 else 1.0):  # both need luck on a busy machine
        for seconds in (0.003, 0.006, 0.012, 0.024, 0.5):
            try:
                call_with_deadline(spin, seconds)
                ends.add("in time")
            except CallTimeout:
                ends.add("late")
    time.sleep(0.05)
    assert ends == {"in time", "late"}
    assert not [thread for thread in threading.enumerate() if thread.name == "covey-deadline"]


def test_a_late_call_on_another_thread_is_abandoned():
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(timed(lambda: call_with_deadline(sleeps, 0.2))))
    thread.start()
    thread.join(60)
    assert outcome and outcome[0] < 20.0


def test_a_call_in_time_returns_or_raises_as_the_function():
    assert call_with_deadline(lambda: 4, 5.0) == 4
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 / 0, 5.0)
    time.sleep(0.01)  # and nothing strikes afterwards


# ---- on other threads ------------------------------------------------------------------------------------------------


class Endless(Exception):
    def __str__(self):
        while True:
            pass


def test_functions_run_in_order_on_one_thread_with_their_errors():
    worker = WorkerThread("covey-example")
    here, there, error = (worker.submit(work) for work in (threading.get_ident, threading.get_ident, lambda: 1 / 0))
    assert here.result(10) == there.result(10) != threading.get_ident()
    assert isinstance(error.exception(10), ZeroDivisionError)
    worker.close()


def test_an_endless_error_message_is_under_the_deadline():
    def raises():
        raise Endless

    with pytest.raises(CallTimeout):
        asyncio.run(run_in_thread(raises, 0.3))


def test_a_thread_that_catches_the_stop_is_counted_until_it_ends():
    late, caught, release = LateCalls("retries", 1), threading.Event(), threading.Event()

    def retries():
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            caught.set()
            release.wait()

    with pytest.raises(CallTimeout):
        asyncio.run(deadlines.run_in_thread(retries, 0.05, late))
    assert caught.wait(20.0) and late.is_full
    release.set()
    wait_until(lambda: not late.is_full)


def test_a_cancelled_call_logs_nothing(caplog):
    async def given_up():
        task = asyncio.ensure_future(run_in_thread(lambda: time.sleep(0.05), 5.0))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0.1)

    asyncio.run(given_up())
    gc.collect()
    assert not caplog.records


def test_a_late_call_of_a_worker_leaves_its_thread_behind():
    worker, release, late = WorkerThread("covey-example"), threading.Event(), LateCalls("waits")
    with pytest.raises(CallTimeout):
        worker.call(release.wait, 0.05, late)
    assert worker.call(lambda: 4, 5.0, late) == 4
    assert len(late.running()) == 1
    release.set()
    wait_until(lambda: not late.running())
    worker.close()


def test_a_late_call_of_a_worker_is_stopped():
    worker, late = WorkerThread("covey-example"), LateCalls("spins", 1)

    def spins():
        while True:
            time.sleep(0.001)

    with pytest.raises(CallTimeout):
        worker.call(spins, 0.01, late)
    late.wait()
    assert worker.call(lambda: 4, 5.0, late) == 4
    worker.close()


def test_calls_that_still_run_are_counted_and_bounded(monkeypatch):
    monkeypatch.setattr(deadlines, "WAIT_SECONDS", 0.1)
    release, late = threading.Event(), LateCalls("waits")

    async def use(calls):
        outcomes = await asyncio.gather(
            *(deadlines.run_in_thread(release.wait, 0.02, late) for _ in range(calls)), return_exceptions=True
        )
        return list(map(type, outcomes))

    others = {*threading.enumerate()}  # of tests before this one, whose ids may be used again
    assert asyncio.run(use(MAX_STILL_RUNNING)) == [CallTimeout] * MAX_STILL_RUNNING
    with pytest.warns(LateCallWarning):
        assert asyncio.run(use(3)) == [StillRunning] * 3  # and no thread is started
    assert sum(one.name == "covey-tool" and one not in others for one in threading.enumerate()) == MAX_STILL_RUNNING
    late.wait()  # not longer than WAIT_SECONDS: nothing stops them
    release.set()
    wait_until(lambda: not late.running())
    late.check()
    assert asyncio.run(use(1)) == [bool]


def test_a_call_that_is_no_longer_awaited_counts_from_its_deadline_on():
    release, late = threading.Event(), LateCalls("waits", 1)

    async def cancelled(seconds):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await deadlines.run_in_thread(release.wait, seconds, late)

    asyncio.run(cancelled(30.0))
    assert not late.is_full  # it is not late
    asyncio.run(cancelled(0.05))
    wait_until(lambda: late.is_full)
    release.set()
    wait_until(lambda: not late.is_full)


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_other_threads_compute_with_as_many_as_their_maker():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        worker = WorkerThread("covey-example", torch_settings())
        torch.set_num_threads(1)  # as while a step is decoded
        assert worker.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 1
        worker.close()
    finally:
        torch.set_num_threads(before)
