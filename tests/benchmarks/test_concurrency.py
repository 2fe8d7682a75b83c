"""The benchmark of slow tools plays real rollouts: a sleep changes nothing, and a call that hangs costs its own."""

import pytest
from benchmarks.concurrency import Judge, play, sleeping

from benchmarks import concurrency


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(concurrency, "PROMPTS", 1)
    monkeypatch.setattr(concurrency, "GROUP", 4)
    monkeypatch.setattr(concurrency, "TURNS", 2)


def test_rollouts_say_the_same_however_long_the_tool_takes(small):
    engine = concurrency.ENGINES["scripted"]()
    quick, slow = play(engine, sleeping(0.0, False, False)), play(engine, sleeping(0.05, True, False))
    assert quick.digests() == slow.digests() and len(set(quick.digests())) == 4
    assert [rollout.calls for rollout in slow.rollouts] == [{"ok": 1}] * 4
    assert slow.seconds >= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
def test_a_call_that_hangs_changes_its_own_rollout_alone(small, blocking):
    engine = concurrency.ENGINES["scripted"]()
    usual = play(engine, sleeping(0.0, blocking, False))
    hung = play(engine, sleeping(0.0, blocking, True), tool_timeout=0.5)
    (one,) = [place for place, rollout in enumerate(hung.rollouts) if rollout.calls.get("timeout")]
    assert hung.rollouts[one].calls == {"timeout": 1}
    for place in range(4):
        assert (hung.digests()[place] == usual.digests()[place]) is (place != one)
    assert hung.ends[one] >= 0.5


@pytest.mark.slow
def test_rewards_are_timed_with_the_rollouts(small):
    engine = concurrency.ENGINES["scripted"]()
    for streamed in (False, True):
        left, whole, cpu = concurrency._scored(engine, sleeping(0.0, False, False), Judge(0.5), streamed, 0)
        assert left >= 0.05 and left < whole and cpu > 0  # the last rollout's reward takes 0.5 s in either case
