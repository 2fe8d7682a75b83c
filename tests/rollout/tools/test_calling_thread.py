"""Ordinary tools, environments and rollout functions are called on the thread that waits for the rollouts."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import threading
import time

import pytest

from covey.rollout.tools.calls import AssistantTurn, ToolCall
from covey.rollout.tools.tool import Tool
from covey.rollout.tools.toolbox import Failure, Toolbox, ToolWarning
from covey.runtime import calling_thread, deadlines
from covey.runtime.calling_thread import CallingThread, calls_wait_here, threaded, wait_within
from covey.runtime.deadlines import CallTimeout, LateCalls, LateCallWarning
from covey.runtime.user_code import UserCodeError
from tests.support.playing import call, play, says, tool_agent


def run(work):
    return CallingThread("covey-test").run(work)


def call_here(function, seconds, **how):
    return calling_thread.call_here(function, seconds, LateCalls("it"), **how)


def toolbox(*functions, timeout=5.0):
    schemas = [{"type": "function", "function": {"name": f"t{i}", "parameters": {}}} for i in range(len(functions))]
    return Toolbox([Tool(f"t{i}", schemas[i], one) for i, one in enumerate(functions)], timeout=timeout)


def ask(box, *names):
    return run(box.answer(AssistantTurn("", [ToolCall(name, {}) for name in names])))


def test_calls_run_on_the_thread_that_waits():
    assert run(call_here(threading.get_ident, 5.0)) == threading.get_ident()
    assert run(call_here(threading.get_ident, 5.0, threaded=True)) != threading.get_ident()
    assert asyncio.run(call_here(threading.get_ident, 5.0)) != threading.get_ident()  # nobody waits for it
    assert not calls_wait_here()


def test_tools_may_use_what_belongs_to_the_main_thread():
    table, local = sqlite3.connect(":memory:"), threading.local()
    local.word = "local"

    def alarm():
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return "in time"

    box = toolbox(
        alarm, lambda: table.execute("select 3").fetchone()[0], lambda: local.word, lambda: asyncio.run(later())
    )
    assert [one.content for one in ask(box, "t0", "t1", "t2", "t3")] == ["in time", "3", "local", "later"]


async def later():
    return "later"


def test_a_function_that_returns_a_coroutine_is_awaited_within_a_running_loop():
    async def notebook():  # whose main thread has a loop that runs
        return ask(toolbox(later, lambda: later()), "t0", "t1")

    assert [one.content for one in asyncio.run(notebook())] == ["later", "later"]


def test_the_loop_continues_while_a_function_runs():
    passed = threading.Event()

    async def both():
        waiting = asyncio.ensure_future(call_here(lambda: passed.wait(5.0), 10.0))
        await asyncio.sleep(0)
        passed.set()
        return await waiting

    assert run(both())


def test_a_late_function_is_interrupted_and_the_next_one_called():
    def slow():
        time.sleep(20)

    late, fine = ask(toolbox(slow, lambda: "fine", timeout=0.1), "t0", "t1")
    assert (late.failure, fine.content) == (Failure.TIMEOUT, "fine")


def test_an_error_in_place_of_an_interrupt_is_a_timeout():
    def replaces():
        try:
            time.sleep(20)
        except BaseException as error:
            raise ValueError("closed") from error

    (late,) = ask(toolbox(replaces, timeout=0.1), "t0")
    assert late.failure is Failure.TIMEOUT


def test_waiting_for_other_calls_is_no_time_of_a_function_or_a_rollout():
    """Four functions of 0.1 s each, with 0.3 s for a function, and a clock that stops while one waits."""
    clocks = []

    class Clock:
        def __init__(self):
            self.paused = 0.0

        @contextlib.contextmanager
        def pause(self):
            begun = time.monotonic()
            yield
            self.paused += time.monotonic() - begun

    async def one():
        clocks.append(Clock())
        wait_within(clocks[-1].pause)
        await call_here(lambda: time.sleep(0.1), 0.3)

    async def all_of_them():
        await asyncio.gather(*(one() for _ in range(4)))

    run(all_of_them())
    assert sum(clock.paused for clock in clocks) >= 0.1 + 0.2 + 0.3 - 0.05


def test_a_cancelled_caller_ends_its_function():
    ended = []

    def endless():
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append(True)

    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await call_here(endless, 60.0)
        return await call_here(lambda: "next", 5.0)

    began = time.monotonic()
    assert run(give_up()) == "next" and ended == [True] and time.monotonic() - began < 20


def test_a_function_that_cannot_be_interrupted_is_reported_and_others_get_threads(monkeypatch):
    """A lock that is taken inside the handler's reach, but in a function that restores itself until it is released."""
    monkeypatch.setattr(deadlines, "BLOCKED_SECONDS", 0.1)
    release = threading.Event()

    def stubborn():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGVTALRM])
        try:
            release.wait(10)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGVTALRM])

    async def other():
        with pytest.raises(CallTimeout):
            await call_here(stubborn, 0.1)
        thread = await call_here(threading.get_ident, 5.0)
        release.set()
        return thread

    with pytest.warns(LateCallWarning):
        assert run(other()) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_function_raises_is_its_own_failure(error):
    def fails():
        raise error

    with pytest.raises(UserCodeError):
        run(call_here(fails, 5.0))


def test_ctrl_c_ends_the_wait():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(call_here(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5), 10.0))
    assert signal.getsignal(signal.SIGINT) is before


def test_threads_that_are_not_the_main_one_get_threads_for_their_calls():
    found = []
    thread = threading.Thread(target=lambda: found.append(run(call_here(threading.get_ident, 5.0))))
    thread.start()
    thread.join()
    assert found[0] not in (thread.ident, threading.get_ident())


def test_marked_tools_wait_together():
    """Each waits for the other, so that one after the other they would not finish."""
    barrier = threading.Barrier(2, timeout=10)

    @threaded
    def meets():
        return str(barrier.wait() in (0, 1))

    assert [one.content for one in ask(toolbox(meets, meets), "t0", "t1")] == ["True", "True"]


class Shop:
    """Opens its connection in `reset`; a reward reads it."""

    def __init__(self):
        self.threads = {threading.get_ident()}

    def reset(self, **row):
        self.threads.add(threading.get_ident())

    def sell(self) -> str:
        """Sell one."""
        self.threads.add(threading.get_ident())
        return "sold"

    def get_reward(self):
        self.threads.add(threading.get_ident())
        return 1.0

    def close(self):
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("on_threads", [False, True])
def test_an_environment_lives_on_one_thread(on_threads):
    kind = threaded(type("OnThreads", (Shop,), {})) if on_threads else Shop
    agent = tool_agent(kind)
    (rollout,) = play(agent, says(call("sell"), "ok"))
    environment = rollout.extras["environments"]
    agent.close()
    assert len(environment.threads) == 1
    assert (environment.threads == {threading.get_ident()}) != on_threads


def test_a_tool_whose_calls_all_fail_is_reported_once():
    def fails():
        raise ValueError("no such row")

    box = toolbox(fails, lambda: "fine")
    ask(box, "t0", "t0", "t1")
    with pytest.warns(ToolWarning, match="all 2 calls of the tool 't0' have failed.*ValueError: no such row") as warned:
        box.warn_of_failures()
        ask(box, "t0")
        box.warn_of_failures()
    assert len(warned) == 1


def test_a_tool_that_has_worked_may_fail(recwarn):
    answers = iter([1, 0])
    box = toolbox(lambda: 1 / next(answers))
    ask(box, "t0")
    ask(box, "t0")
    box.warn_of_failures()
    assert not recwarn.list
