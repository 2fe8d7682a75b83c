"""Functions of users on threads: deadlines, threads that are stopped, and nothing left behind."""

import asyncio
import gc
import threading
import time

import pytest

from covey.runtime.deadlines import CallTimeout, run_in_thread
from covey.runtime.worker_thread import WorkerThread


class Endless(Exception):
    def __str__(self):
        while True:
            pass


def test_functions_run_in_order_on_one_thread_and_keep_their_errors():
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


def test_code_that_catches_the_stop_meets_it_again():
    """A retry loop with a bare `except` catches the first request to stop; the second comes while it waits."""
    caught, ended = [], threading.Event()

    def retries():
        try:
            while True:
                try:
                    while True:
                        time.sleep(0.001)
                except BaseException as error:
                    caught.append(error)
                    for _ in range(10_000):
                        time.sleep(0.001)
        finally:
            ended.set()

    with pytest.raises(CallTimeout):
        asyncio.run(run_in_thread(retries, 0.05))
    assert ended.wait(20.0) and caught


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
