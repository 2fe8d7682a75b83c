"""Collecting rollouts: order, siblings and seeds."""

import asyncio
import threading
from contextlib import contextmanager, nullcontext

import pytest

from covey.core.engine import SamplingParams
from covey.core.records import Completion, FinishReason
from covey.rollout.collector import Collector, PromptSample, run_async
from covey.rollout.prompts import PromptCodec, sample_seed

PARAMS = SamplingParams(max_tokens=4)


class Echo:
    """An engine that answers each seed with a token made from it, later prompts first."""

    def __init__(self, versions=None):
        self.requests = []
        self.versions = versions

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0.001 * (5 - len(self.requests)))
        made = ([seed % 100 + 4] for seed in request.seeds)
        return [Completion(ids, [0.0], FinishReason.STOP, versions=self.versions) for ids in made]

    def load_weights(self, update):
        pass

    def awake(self):
        return nullcontext()


def draws(prompts, group):
    return [PromptSample({"prompt": "abc"[p]}, p, s) for p in prompts for s in range(group)]


@pytest.fixture
def collector(tiny_tokenizer):
    return Collector(Echo(), PromptCodec(tiny_tokenizer, None, None), seed=7)


def test_rollouts_keep_the_order_of_their_samples(collector):
    rollouts = collector.collect(draws([0, 1, 2], 2), PARAMS, ("train", 0))
    expected = [sample_seed(7, "train", 0, p, s) % 100 + 4 for p in range(3) for s in range(2)]
    assert [r.completion_ids[0] for r in rollouts] == expected
    assert [r.group for r in rollouts] == [0, 0, 1, 1, 2, 2]


def test_a_group_is_one_request(collector):
    collector.collect(draws([0, 1], 3), PARAMS, ("train", 0))
    assert [request.n for request in collector.engine.requests] == [3, 3]


def test_a_share_of_a_group_keeps_its_seeds(collector):
    whole = collector.collect(draws([0], 4), PARAMS, ("train", 0))
    half = collector.collect(draws([0], 4)[2:], PARAMS, ("train", 0))
    assert [r.completion_ids for r in half] == [r.completion_ids for r in whole[2:]]


def test_the_same_prompt_again_is_another_group(collector):
    rollouts = collector.collect(draws([0, 0], 2), PARAMS, ("train", 0))
    assert [r.group for r in rollouts] == [0, 0, 1, 1]


def test_another_batch_key_samples_differently(collector):
    first = collector.collect(draws([0, 1], 4), PARAMS, ("train", 0))
    second = collector.collect(draws([0, 1], 4), PARAMS, ("train", 1))
    assert [r.completion_ids for r in first] != [r.completion_ids for r in second]


@pytest.mark.parametrize("versions", [None, [3]])
def test_the_version_that_sampled_a_token_stays_with_it(tiny_tokenizer, versions):
    collector = Collector(Echo(versions), PromptCodec(tiny_tokenizer, None, None), seed=7)
    assert [r.versions for r in collector.collect(draws([0], 2), PARAMS, ("train", 0))] == [versions, versions]


def test_an_empty_batch_is_no_error(collector):
    assert collector.collect([], PARAMS, ("eval", 0)) == []


def test_the_engine_is_given_the_exception_that_ends_a_batch(tiny_tokenizer):
    class Fails(Echo):
        ended_by = ()

        @contextmanager
        def awake(self):
            try:
                yield
            except BaseException as error:
                self.ended_by += (str(error),)
                raise
            else:
                self.ended_by += (None,)

        async def generate(self, request):
            if request.prompt_ids == tiny_tokenizer.encode("b"):
                raise ValueError("it does not fit")
            return await super().generate(request)

    collector = Collector(engine := Fails(), PromptCodec(tiny_tokenizer, None, None), seed=7)
    collector.collect(draws([0], 2), PARAMS, (0,))
    with pytest.raises(ValueError, match="it does not fit"):
        collector.collect(draws([0, 1], 2), PARAMS, (1,))
    collector.collect(draws([0], 2), PARAMS, (2,))
    assert engine.ended_by == (None, "it does not fit", None)


def test_coroutines_run_inside_a_running_loop_too():
    async def answer():
        return 42

    async def notebook():
        return run_async(answer())

    assert run_async(answer()) == 42
    assert asyncio.run(notebook()) == 42


def test_sampling_takes_no_gradients_in_a_notebook_either(tiny_tokenizer, tiny_model):
    import torch

    from covey.engines.native.engine import NativeEngine

    modes = []
    tiny_model.register_forward_hook(
        lambda *args: modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    )
    engine = NativeEngine(
        lambda: tiny_model,
        eos_token_ids={1},
        pad_token_id=0,
        forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    collector = Collector(engine, PromptCodec(tiny_tokenizer, None, None), seed=0)

    async def notebook():
        collector.collect(draws([0, 1], 2), PARAMS, ("train", 0))

    asyncio.run(notebook())
    assert not any(gradients for gradients, _ in modes)
    proof = [mixed for _, mixed in modes].count(False)  # of shared prompts, made once and in full precision
    assert proof == 3 and modes[proof:] == [(False, True)] * (len(modes) - proof)


def test_an_interrupted_wait_cancels_the_coroutine(monkeypatch):
    ended = []

    async def rollout():
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    def interrupted(thread, future, seconds):
        thread.start(asyncio.sleep(0)).result(20)  # it is under way
        raise KeyboardInterrupt

    async def notebook():
        run_async(rollout())

    monkeypatch.setattr("covey.runtime.loop_thread.LoopThread.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())
    assert ended == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "covey-sampling" and thread.is_alive()]
