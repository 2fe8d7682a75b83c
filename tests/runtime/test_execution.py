"""Code that may hang, on threads and on an event loop of its own: what it does to others, and what is left of it."""

import asyncio
import gc
import threading
import time

import pytest

from covey.runtime.error_text import describe
from covey.runtime.user_code import CoroutineLoop, Raised, TimedOut, run_in_thread


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Endless(Exception):
    def __str__(self):
        while True:
            pass


class Exits(Exception):
    def __str__(self):
        raise SystemExit(0)


def test_an_exception_is_described_whatever_its_message_does():
    assert describe(ValueError("no")) == "ValueError: no"
    assert describe(ValueError()) == "ValueError"
    assert describe(Exits()) == "Exits"
    assert describe(ValueError("x" * 10_000)) == "ValueError: " + "x" * 500 + "..."


def test_a_message_that_takes_for_ever_is_under_the_deadline():
    def raises():
        raise Endless

    with pytest.raises(TimedOut):
        asyncio.run(run_in_thread(raises, 0.3))


def test_code_that_swallows_its_end_is_told_again():
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

    with pytest.raises(TimedOut):
        asyncio.run(run_in_thread(retries, 0.05))
    wait_until(lambda: caught)
    assert not ended.is_set()
    assert ended.wait(10.0)


def test_nothing_is_said_of_what_nobody_waits_for(caplog):
    async def given_up():
        task = asyncio.ensure_future(run_in_thread(lambda: time.sleep(0.05), 5.0))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0.1)

    asyncio.run(given_up())
    gc.collect()
    assert not caplog.records


# ---- the loop of coroutines ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("hostile", [starts_what_exits, stops_the_loop])
def test_what_ends_a_loop_ends_it_for_nobody(hostile):
    loop = CoroutineLoop()

    async def both():
        return await asyncio.gather(loop.run(fine, 5.0), loop.run(hostile, 5.0))

    assert asyncio.run(both()) == ["fine", "fine"]


def test_an_exception_of_any_kind_is_an_answer():
    with pytest.raises(Raised) as raised:
        asyncio.run(CoroutineLoop().run(exits, 5.0))
    assert raised.value.text == "SystemExit: 0" and isinstance(raised.value.error, SystemExit)


def test_others_on_a_loop_that_spins_go_on_once_it_is_stopped():
    loop = CoroutineLoop()

    async def both():
        spinning = asyncio.ensure_future(loop.run(spins, 0.2))
        other = await loop.run(fine, 20.0)
        await asyncio.wait({spinning})
        return other, spinning.exception(), await loop.run(fine, 5.0)

    before, late, after = asyncio.run(both())
    assert (before, type(late), after) == ("fine", TimedOut, "fine")


def test_a_loop_on_which_several_spin_is_freed_of_all_of_them():
    before, loop = threads(), CoroutineLoop()

    async def several():
        spinning = [asyncio.ensure_future(loop.run(spins, 0.2)) for _ in range(3)]
        await asyncio.wait(spinning)
        return [one.exception() for one in spinning]

    assert [type(one) for one in asyncio.run(several())] == [TimedOut] * 3
    wait_until(lambda: threads() <= before)


def threads():
    return {one for one in threading.enumerate() if one.name == "covey-async-tools"}


def test_a_loop_that_was_blocked_ends_when_it_no_longer_is():
    before, release = threads(), threading.Event()
    loop = CoroutineLoop()

    async def blocks():
        release.wait()

    async def use():
        with pytest.raises(TimedOut):
            await loop.run(blocks, 0.1)
        return await loop.run(fine, 5.0)

    assert asyncio.run(use()) == "fine"
    assert len(threads() - before) == 2
    release.set()
    wait_until(lambda: len(threads() - before) == 1)
    loop.close()
    wait_until(lambda: threads() <= before)


def test_a_loop_ends_when_nobody_refers_to_it():
    before = threads()
    loop = CoroutineLoop()
    assert asyncio.run(loop.run(fine, 5.0)) == "fine"
    del loop
    gc.collect()
    wait_until(lambda: threads() <= before)
