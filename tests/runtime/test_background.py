"""The thread that samples in the background: results, failures, and an end within a deadline."""

import asyncio
import threading
import time

import pytest

from covey.runtime.sampling_thread import SamplingThread


@pytest.fixture
def thread():
    thread = SamplingThread()
    yield thread
    thread.close()


async def answer(value):
    await asyncio.sleep(0.01)
    return value


def test_work_goes_on_beside_the_caller(thread):
    first, second = thread.start(answer(1)), thread.start(answer(2))
    assert (thread.wait(second), thread.wait(first)) == (2, 1)


def test_all_work_meets_one_event_loop(thread):
    async def loop():
        return asyncio.get_running_loop()

    assert thread.run(loop()) is thread.run(loop())


def test_a_failure_surfaces_where_it_is_waited_for_with_its_own_message(thread):
    async def fail():
        raise ConnectionError("the server is gone")

    work = thread.start(fail())
    assert thread.run(answer(3)) == 3
    with pytest.raises(ConnectionError, match="the server is gone"):
        thread.wait(work)


def test_a_timeout_of_the_works_own_is_a_failure_like_any_other(thread):
    async def late():
        raise TimeoutError("no answer within 3 s")

    with pytest.raises(TimeoutError, match="no answer within 3 s"):
        thread.run(late())


def test_closing_cancels_what_is_under_way_and_lets_it_clean_up(thread):
    cleaned = []

    async def endless():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    work = thread.start(endless())
    thread.run(answer(0))
    assert thread.close(5.0)
    assert cleaned == [True] and work.cancelled()
    assert "covey-sampling" not in {other.name for other in threading.enumerate()}


def test_closing_ends_within_its_deadline_though_the_work_does_not(thread):
    release = threading.Event()

    async def blocks_the_loop():
        release.wait(30)

    thread.start(blocks_the_loop())
    began = time.monotonic()
    assert not thread.close(0.3)
    assert time.monotonic() - began < 5
    release.set()


def test_waiting_for_a_thread_that_has_ended_is_an_error_and_no_hang(thread, monkeypatch):
    monkeypatch.setattr("covey.runtime.sampling_thread.LOOK", 0.05)
    work = thread.start(asyncio.sleep(3600))
    thread._loop.call_soon_threadsafe(thread._loop.stop)
    thread._thread.join()
    with pytest.raises(RuntimeError, match="the thread that samples has ended"):
        thread.wait(work)
