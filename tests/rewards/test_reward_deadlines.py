"""Nothing waits for ever: functions, coroutines and worker processes that hang."""

import asyncio
import threading
import time

import pytest

from covey.rewards import RewardSuite, RewardWarning


def test_functions_with_alarms_stay_on_the_main_thread(score):
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


def test_async_functions_run_beside_each_other_and_sync_ones(score):
    begun = {name: threading.Event() for name in ("first", "second", "third")}

    async def all_begun(name):
        begun[name].set()
        while not all(one.is_set() for one in begun.values()):
            await asyncio.sleep(0.01)

    async def first(completions):
        await all_begun("first")
        return [1.0]

    async def second(completions):
        await all_begun("second")
        return [2.0]

    def third(completions):
        begun["third"].set()
        return [3.0 * all(one.wait(120) for one in begun.values())]

    assert score(RewardSuite([first, third, second]), ["a"])[0] == [[1.0, 3.0, 2.0]]


@pytest.mark.slow
def test_a_blocked_loop_does_not_block_the_next_batch(score, monkeypatch):
    monkeypatch.setattr("covey.rewards.call.LOOP_GRACE", 0.1)
    blocked = [True]

    async def blocks(completions):
        if blocked.pop() if blocked else False:
            time.sleep(1.5)
        return [1.0]

    suite = RewardSuite(blocks, timeout=0.2)
    with pytest.warns(RewardWarning):
        assert score(suite, ["a"])[0] == [[None]]
    assert score(suite, ["a"])[0] == [[1.0]]
