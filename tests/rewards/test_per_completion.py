"""Functions that judge each completion by itself: scored as rollouts end, with what one call for all would give."""

import asyncio
import functools
import math
import random
import threading

import pytest

from covey.core.records import FinishReason
from covey.rewards import (
    RewardError,
    RewardSuite,
    RewardWarning,
    accuracy_reward,
    get_cosine_scaled_reward,
    numeric_match_reward,
    per_completion,
)
from covey.rewards.contract import is_per_completion

SIZE = 12
TEXTS = [rf"It is \boxed{{{number}}}." for number in range(SIZE)]
ROWS = [{"prompt": "question", "solution": "4", "number": number} for number in range(SIZE)]


@per_completion
def fails_at_five(number, log_extra, log_metric, **kwargs):
    if 5 in number:
        raise ValueError("five")
    log_extra("half", [n / 2 for n in number])
    log_metric("mean_number", sum(number) / len(number))
    return [None if n == 3 else math.nan if n == 7 else float(n) for n in number]


@per_completion
async def waits(number, log_extra, **kwargs):
    for n in number:
        await asyncio.sleep(0.001 * (SIZE - n))  # later ones answer earlier
    log_extra("waited", list(number))
    return [n * 0.5 for n in number]


def unmarked(completions, **kwargs):
    return [float(len(completions))] * len(completions)


@pytest.fixture
def one_by_one(context):
    """`one_by_one(suite, rollouts)` -> its result; rollouts end in an order of chance."""

    def run(suite, rollouts, rows=ROWS, seed=0):
        order = list(range(len(rollouts)))
        random.Random(seed).shuffle(order)
        with suite.stream(None) as stream:
            for place in order:
                stream.on_rollouts(place, rows[place : place + 1], rollouts[place : place + 1])
            return suite(rows, rollouts, context, stream)

    return run


@pytest.mark.filterwarnings("ignore::covey.rewards.RewardWarning")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rewards_counts_and_columns_are_those_of_one_call(one_by_one, context, rollout, seed):
    functions = [fails_at_five, waits, accuracy_reward, get_cosine_scaled_reward(max_len=8), unmarked]
    rollouts = [rollout(text) for text in TEXTS]
    # A call that is given several at a time logs their mean, so that five of them raises costs it the others' metrics.
    whole = RewardSuite(functions)(ROWS, rollouts, context)
    columns = dict(context.extras)
    context.extras.clear()
    parts = one_by_one(RewardSuite(functions), rollouts, seed=seed)
    assert parts.rewards.nan_to_num(-9.0).equal(whole.rewards.nan_to_num(-9.0))
    assert parts.rewards[:, 4].tolist() == [12.0] * SIZE  # not marked: one call for all
    assert {name: stat.value() for name, stat in parts.stats.items() if not name.endswith("seconds")} == {
        name: stat.value() for name, stat in whole.stats.items() if not name.endswith("seconds")
    }
    assert context.extras == columns and list(context.extras) == list(columns)
    assert columns["half"] == [None if n == 5 else n / 2 for n in range(SIZE)]
    assert columns["waited"] == list(range(SIZE))


def test_metrics_come_in_the_order_of_the_rollouts(one_by_one, context, rollout):
    with pytest.warns(RewardWarning, match=r"failed on 2 of 12 samples \(ValueError: five \("):
        one_by_one(RewardSuite(fails_at_five), [rollout(text) for text in TEXTS])
    assert context.metrics == [("mean_number", float(n)) for n in range(SIZE) if n != 5]


def test_a_completion_is_scored_before_the_next_has_ended(context, rollout):
    scored = threading.Event()

    @per_completion
    def tells(completions, **kwargs):
        scored.set()
        return [1.0] * len(completions)

    rollouts = [rollout(text) for text in TEXTS[:2]]
    suite = RewardSuite(tells)
    with suite.stream(None) as stream:
        stream.on_rollouts(1, ROWS[1:2], rollouts[1:])
        assert scored.wait(20)
        stream.on_rollouts(0, ROWS[:1], rollouts[:1])
        assert suite(ROWS[:2], rollouts, context, stream).rewards.tolist() == [[1.0], [1.0]]


def test_a_hanging_completion_costs_itself_alone(one_by_one, rollout):
    @per_completion
    async def hangs_at_two(number, **kwargs):
        if number == [2]:
            await asyncio.sleep(60)
        return [1.0] * len(number)

    suite = RewardSuite(hangs_at_two, timeout=0.3)
    with pytest.warns(RewardWarning, match=r"did not score 1 of 12 samples within 0.3 s"):
        result = one_by_one(suite, [rollout(text) for text in TEXTS])
    assert result.rewards.isnan().flatten().nonzero().flatten().tolist() == [2]
    assert result.stats["rewards/hangs_at_two/timeouts"].value() == 1


def test_a_marked_function_is_called_once_per_completion(context, rollout):
    calls = []

    @per_completion
    def counts(completions, **kwargs):
        calls.append(len(completions))
        return [1.0] * len(completions)

    rollouts = [rollout(text) for text in TEXTS[:4]]
    suite = RewardSuite([counts, unmarked])
    with suite.stream(None, groups=True) as stream:
        for place in (0, 1, 2, 3):
            stream.on_rollouts(place, ROWS[place : place + 1], rollouts[place : place + 1])
        stream.on_group(0, ROWS[:2], rollouts[:2])
        stream.on_group(2, ROWS[2:4], rollouts[2:4])
        rewards = suite(ROWS[:4], rollouts, context, stream).rewards
    assert calls == [1] * 4
    assert rewards.tolist() == [[1.0, 2.0]] * 4


def test_no_stream_where_no_function_could_use_it():
    assert not RewardSuite([unmarked, numeric_match_reward]).stream(None).spans()
    assert [*RewardSuite([unmarked]).stream(None, groups=True).spans()] == [0]
    assert [*RewardSuite([unmarked, accuracy_reward]).stream(None).spans()] == [1]


def test_a_function_that_looks_at_the_trainer_waits_for_the_end(context, rollout):
    @per_completion
    def by_step(completions, trainer_state, **kwargs):
        return [float(len(completions))] * len(completions)

    suite = RewardSuite(by_step)
    assert 0 not in suite.stream(None)
    assert suite(ROWS[:2], [rollout(text) for text in TEXTS[:2]], context).rewards.tolist() == [[2.0], [2.0]]


def test_marks_are_found_through_partials_and_on_objects():
    @per_completion
    class Judge:
        def __call__(self, completions, **kwargs):
            return [0.0] * len(completions)

    assert is_per_completion(Judge()) and is_per_completion(functools.partial(functools.partial(accuracy_reward), a=1))
    assert not is_per_completion(unmarked) and not is_per_completion(numeric_match_reward)
    with pytest.raises(RewardError, match="cannot be marked per_completion"):
        per_completion(Judge().__call__)


@pytest.mark.parametrize("streamed", [False, True])
def test_failed_rollouts_are_shown_to_nobody_and_have_no_reward(one_by_one, context, rollout, streamed):
    seen = []

    @per_completion
    def reads(completions, number, log_extra, **kwargs):
        seen.extend(number)
        log_extra("number", number)
        return [float(bool(completion)) for completion in completions]

    rollouts = [rollout(text) for text in TEXTS[:4]]
    rollouts[1].finish, rollouts[1].completion = FinishReason.ERROR, []
    suite = RewardSuite([reads])
    result = one_by_one(suite, rollouts, ROWS[:4]) if streamed else suite(ROWS[:4], rollouts, context)
    assert sorted(seen) == [0, 2, 3]
    assert result.rewards.isnan().flatten().tolist() == [False, True, False, False]
    assert result.stats["rewards/reads/failures"].value() == 0
    assert context.extras == {"number": [0, None, 2, 3]}


def test_a_batch_of_failed_rollouts_alone_has_no_rewards(context, rollout):
    failed = rollout("")
    failed.finish = FinishReason.ERROR
    assert RewardSuite(unmarked)(ROWS[:1], [failed], context).rewards.isnan().tolist() == [[True]]
