"""Groups that are scored as they are sampled: the rewards are those of one call, failures stay in their group."""

import asyncio
import math
import threading
import time

import pytest

from covey.rewards import RewardError, RewardSuite, RewardWarning, per_completion
from covey.runtime import deadlines

GROUPS = 4
SIZE = 3
TEXTS = [f"group {number} sample {sample}" for number in range(GROUPS) for sample in range(SIZE)]
ORDER = [2, 0, 3, 1]
"""In which groups are sampled."""


def place(text):
    """ "group 2 sample 1" -> 2 * 3 + 1."""
    _, number, _, sample = text.split()
    return int(number) * SIZE + int(sample)


def number_of(completions):
    return place(completions[0]) // SIZE


@pytest.fixture
def streamed(context, rollout):
    """`streamed(suite)` -> rewards, stats; groups come one after another in ORDER."""

    def run(suite, order=ORDER):
        rollouts = [rollout(text) for text in TEXTS]
        rows = [{"prompt": "question", "place": place(text)} for text in TEXTS]
        with suite.stream("state", groups=True) as stream:
            for number in order:
                part = slice(number * SIZE, (number + 1) * SIZE)
                stream.on_group(number, rows[part], rollouts[part])
            result = suite(rows, rollouts, context, stream)
        return result.rewards[:, 0].tolist(), {name: stat.value() for name, stat in result.stats.items()}

    return run


def by_place(completions, place, log_extra, log_metric, **kwargs):
    log_extra("place", place)
    log_metric("mean_place", sum(place) / len(place))
    return [float(p) for p in place]


async def abstains(place, **kwargs):
    await asyncio.sleep(0)
    return [None if p % 2 else float(p) for p in place]


def nan_at_five(place, **kwargs):
    return [math.nan if p == 5 else 1.0 for p in place]


def raises_at_seven(place, log_extra, **kwargs):
    if 7 in place:
        raise ValueError("seven")
    log_extra("seen", [True] * len(place))
    return [2.0] * len(place)


@pytest.mark.filterwarnings("ignore::covey.rewards.RewardWarning")
def test_rewards_counts_and_logs_are_those_of_one_call(streamed, context, rollout):
    functions = [by_place, abstains, nan_at_five, raises_at_seven]
    rows = [{"prompt": "question", "place": place(text)} for text in TEXTS]
    rollouts = [rollout(text) for text in TEXTS]
    whole = RewardSuite(functions)(rows, rollouts, context)
    extras = dict(context.extras)
    context.extras.clear()
    suite = RewardSuite(functions)
    with suite.stream(None, groups=True) as stream:
        for number in ORDER:
            part = slice(number * SIZE, (number + 1) * SIZE)
            stream.on_group(number, rows[part], rollouts[part])
        parts = suite(rows, rollouts, context, stream)
    assert parts.rewards.nan_to_num(-1.0).equal(whole.rewards.nan_to_num(-1.0))
    for name, stat in whole.stats.items():
        if not name.endswith("/seconds"):
            assert parts.stats[name].value() == stat.value(), name
    assert list(parts.stats) == list(whole.stats)
    # The whole batch is tried again sample by sample, and so is group 2 alone: only sample 7 logs nothing.
    assert context.extras == extras
    assert extras["seen"] == [None if p == 7 else True for p in range(12)]
    # once for the whole, 5.5, then group by group in their order: (0 + 1 + 2) / 3, ...
    assert [value for name, value in context.metrics if name == "mean_place"] == [5.5, 1.0, 4.0, 7.0, 10.0]


def test_sync_functions_score_groups_and_async_ones_batches(context, rollout):
    lock, everybody_came = threading.Lock(), asyncio.Event()
    here, most = [], []

    def alone(completions, **kwargs):
        assert lock.acquire(blocking=False)
        time.sleep(0.01)
        lock.release()
        most.append(number_of(completions))
        return [0.0] * len(completions)

    async def together(completions, **kwargs):
        here.append(number_of(completions))
        if len(here) == GROUPS:
            everybody_came.set()
        await everybody_came.wait()
        return [1.0] * len(completions)

    rollouts, rows = [rollout(text) for text in TEXTS], [{"prompt": "question"}] * len(TEXTS)
    suite = RewardSuite([alone, together], timeout=20.0)
    with suite.stream(None, groups=True) as stream:
        for number in ORDER:
            part = slice(number * SIZE, (number + 1) * SIZE)
            stream.on_group(number, rows[part], rollouts[part])
        rewards = suite(rows, rollouts, context, stream).rewards
    assert most == ORDER
    assert rewards.tolist() == [[0.0, 1.0]] * len(TEXTS)


def test_one_rollout_batch_at_a_time_calls_a_function(context, rollout):
    inside, most, began = 0, 0, threading.Event()

    def counts_those_inside(completions, **kwargs):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        began.set()
        time.sleep(0.05)
        inside -= 1
        return [1.0] * len(completions)

    suite = RewardSuite(counts_those_inside)
    rows, rollouts = [{"prompt": "question"}], [rollout("a")]
    with suite.stream("state", groups=True) as early, suite.stream("state", groups=True) as late:
        early.on_group(0, rows, rollouts)
        assert began.wait(10)
        late.on_group(0, rows, rollouts)
        assert suite(rows, rollouts, context).rewards.tolist() == [[1.0]]  # nor by one that is not streamed
        assert late.results()[0].values == early.results()[0].values == [1.0]
    assert most == 1


def test_a_group_is_scored_before_the_next_is_there(context, rollout):
    scored = threading.Event()

    def tells(completions, **kwargs):
        scored.set()
        return [1.0] * len(completions)

    rollouts, rows = [rollout(text) for text in TEXTS[: 2 * SIZE]], [{"prompt": "question"}] * 2 * SIZE
    suite = RewardSuite(tells)
    with suite.stream(None, groups=True) as stream:
        stream.on_group(0, rows[:SIZE], rollouts[:SIZE])
        assert scored.wait(20)  # the second group is not sampled yet
        stream.on_group(1, rows[SIZE:], rollouts[SIZE:])
        assert suite(rows, rollouts, context, stream).rewards.tolist() == [[1.0]] * 2 * SIZE


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_group_costs_that_group_alone(streamed, kind):
    def hangs(completions, **kwargs):
        while number_of(completions) == 1:
            time.sleep(0.01)
        return [1.0] * len(completions)

    async def hangs_async(completions, **kwargs):
        if number_of(completions) == 1:
            await asyncio.sleep(30)
        return [1.0] * len(completions)

    suite = RewardSuite([hangs if kind == "sync" else hangs_async], timeout=0.5)
    with pytest.warns(RewardWarning, match="did not score 3 of 12 samples within 0.5 s"):
        rewards, stats = streamed(suite, order=[1, 0, 2, 3])
    assert [math.isnan(value) for value in rewards] == [3 <= p < 6 for p in range(12)]
    assert stats[f"rewards/{suite.names[0]}/timeouts"] == 3


def test_a_function_that_is_always_late_is_given_up(streamed):
    called = []

    def hangs(completions, **kwargs):
        called.append(number_of(completions))
        while True:
            time.sleep(0.01)

    suite = RewardSuite(hangs, timeout=0.1)
    with pytest.warns(RewardWarning, match="did not score 12 of 12 samples"):
        rewards, _ = streamed(suite)
    assert all(map(math.isnan, rewards))
    assert called == ORDER[:3]  # three groups late, and the fourth is not tried


@pytest.mark.filterwarnings("ignore::covey.runtime.deadlines.LateCallWarning")
@pytest.mark.parametrize("groups", [False, True], ids=["per_completion", "stream_rewards"])
def test_calls_never_overlap_and_a_hang_costs_one_thread(context, rollout, groups, monkeypatch):
    """A call that nothing can stop: in this batch and the next, the function is not called until it has returned."""
    monkeypatch.setattr(deadlines, "WAIT_SECONDS", 0.1)
    release, calls, inside, most = threading.Event(), [], 0, 0

    def hangs_on_bad(completions, **kwargs):
        nonlocal inside, most
        calls.append(completions)
        inside += 1
        most = max(most, inside)
        try:
            if "bad" in completions:
                release.wait()
        finally:
            inside -= 1
        return [1.0] * len(completions)

    suite = RewardSuite(hangs_on_bad if groups else per_completion(hangs_on_bad), timeout=0.05)
    before = threading.active_count()

    def step():
        with suite.stream(None, groups=groups) as stream:
            for place, text in enumerate(["ok", "bad", "ok"]):
                (stream.on_group if groups else stream.on_rollouts)(place, [{"prompt": ""}], [rollout(text)])
            return stream.results()[0]

    first = step()
    assert [type(one.error) for one in first.failures.values()] == [deadlines.CallTimeout, deadlines.StillRunning]
    assert first.values[0] == 1.0
    for _ in range(3):
        assert all(isinstance(one.error, deadlines.StillRunning) for one in step().failures.values())
    batch = [{"prompt": ""}], [rollout("ok")]
    assert suite(*batch, context).rewards.isnan().all()  # nor by a call on the main thread
    wait_for(lambda: threading.active_count() <= before + 1)  # the call
    release.set()
    wait_for(lambda: not suite.functions[0].late.running())
    assert suite(*batch, context).rewards.tolist() == [[1.0]]
    assert most == 1 and calls == [["ok"], ["bad"], ["ok"]]


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.slow
def test_a_coroutine_that_blocks_the_loop_ends_too(streamed):
    async def blocks(completions, **kwargs):
        time.sleep(8)

    with pytest.warns(RewardWarning, match="did not score 12 of 12 samples"):
        start = time.monotonic()
        streamed(RewardSuite(blocks, timeout=0.2))
    assert time.monotonic() - start < 6.0  # 0.2 s and a grace of 2 s, not once for each group


def test_a_function_that_raises_on_every_group_stops_the_run(streamed):
    def broken(completions, **kwargs):
        raise KeyError("nothing works")

    with pytest.raises(RewardError, match="'broken' failed on all 12 samples"):
        streamed(RewardSuite(broken))


def test_a_group_for_which_rewards_are_missing_gets_none(streamed):
    def short(completions, **kwargs):
        return [1.0] * (2 if number_of(completions) == 2 else 3)

    with pytest.warns(
        RewardWarning, match=r"'short' failed on 3 of 12 samples \(it returned 2 rewards for 3 completions"
    ):
        streamed(RewardSuite(short))


def test_the_first_failure_that_is_shown_is_the_first_in_order(streamed):
    def some(completions, **kwargs):
        if number_of(completions) in (1, 2):
            raise ValueError(completions[0])
        return [1.0] * len(completions)

    with pytest.warns(RewardWarning, match=r"failed on 6 of 12 samples \(ValueError: group 1 sample 0 \("):
        streamed(RewardSuite(some))


def test_leaving_gives_up_what_is_not_scored(context, rollout):
    begun, go_on, called = threading.Event(), threading.Event(), []

    def waits(completions, **kwargs):
        called.append(number_of(completions))
        begun.set()
        go_on.wait(20)
        return [1.0] * len(completions)

    suite = RewardSuite(waits)
    rollouts, rows = [rollout(text) for text in TEXTS], [{"prompt": "question"}] * len(TEXTS)
    with pytest.raises(ZeroDivisionError), suite.stream(None, groups=True) as stream:
        for number in range(GROUPS):
            stream.on_group(number, rows[:SIZE], rollouts[number * SIZE : (number + 1) * SIZE])
        begun.wait(20)
        raise ZeroDivisionError  # sampling failed
    go_on.set()
    workers = [thread for thread in threading.enumerate() if thread.name == "covey-rewards"]
    for thread in workers:
        thread.join(20)
    assert called == [0]


def test_leaving_a_stream_cancels_calls_of_async_functions(rollout):
    began, cancelled = threading.Event(), threading.Event()

    async def never(completions, **kwargs):
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with RewardSuite(never).stream(None, groups=True) as stream:
        stream.on_group(0, [{"prompt": "question"}], [rollout("a")])
        assert began.wait(10)
    assert cancelled.wait(10)
