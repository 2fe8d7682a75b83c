"""The scripted engine: its answers, times, lanes and versions are those of the script and of nothing else."""

import asyncio

import pytest
import torch

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams, TensorSpec, WeightUpdate
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine


def request(*seeds, max_tokens=8):
    return SampleRequest([5, 6], len(seeds), SamplingParams(max_tokens), list(seeds))


def update(version, announced=2):
    tensors = [("w", torch.ones(2))]
    return WeightUpdate(version, (TensorSpec("w", (announced,), torch.float32),), lambda: iter(tensors))


def echo(prompt_ids, seed):
    return [prompt_ids[-1], *([7] * seed)]


def test_it_is_an_engine():
    assert isinstance(ScriptedEngine(echo), RolloutEngine)


def test_completions_follow_the_script_and_the_budget():
    one, two = asyncio.run(ScriptedEngine(echo).generate(request(1, 4, max_tokens=3)))
    assert (one.token_ids, one.finish, one.logprobs) == ([6, 7], FinishReason.STOP, None)
    assert (two.token_ids, two.finish) == ([6, 7, 7], FinishReason.LENGTH)


def test_log_probs_are_reported_where_the_script_has_them():
    engine = ScriptedEngine(echo, logprobs=lambda prompt, ids: [-0.5 * token for token in ids])
    (one,) = asyncio.run(engine.generate(request(1)))
    assert one.logprobs == [-3.0, -3.5]


def test_concurrency_bounds_how_many_requests_run_at_once():
    async def three(engine):
        await asyncio.gather(*(engine.generate(request(1)) for _ in range(3)))
        return [(served.began, served.ended) for served in engine.served]

    free = asyncio.run(three(ScriptedEngine(echo, seconds=lambda number: [0.15, 0.1, 0.05][number])))
    ended = [end for _, end in free]
    assert ended == sorted(ended, reverse=True)  # all at once: the shortest ends first
    single = asyncio.run(three(ScriptedEngine(echo, seconds=0.05, lanes=1)))
    ended = [end for _, end in single]
    assert ended == sorted(ended) and ended[2] - ended[1] >= 0.045 and ended[1] - ended[0] >= 0.045


def test_request_keeps_the_weights_of_its_start():
    engine = ScriptedEngine(echo, seconds=0.05)

    async def overtaken():
        engine.load_weights(update(3))
        first = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0)
        engine.load_weights(update(4))
        second = await engine.generate(request(1))
        return (await first)[0].versions, second[0].versions

    assert asyncio.run(overtaken()) == ([3, 3], [4, 4])


def test_lanes_work_in_successive_event_loops():
    engine = ScriptedEngine(echo, seconds=0.01, lanes=1)

    async def two():
        return await asyncio.gather(engine.generate(request(1)), engine.generate(request(2)))

    assert asyncio.run(two()) == asyncio.run(two())


def test_weights_that_differ_from_the_announcement_are_refused():
    with pytest.raises(RuntimeError, match=r"version 1: 'w' \[3\].*'w' \[2\]"):
        ScriptedEngine(echo).load_weights(update(1, announced=3))
