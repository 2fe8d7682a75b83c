"""vLLM inside this process: what it samples, the weights it takes, and what it leaves alone."""

import asyncio
import multiprocessing
import os
import random
import signal

import pytest
import torch

from tests.real_vllm import colocated
from tests.real_vllm.colocated import END, greedy, request, sample, scored

pytest.importorskip("vllm.sampling_params")

from covey.policy.weights import weight_update

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(10, 60))


@pytest.fixture(scope="module")
def state():
    """Process-wide state before and after vLLM started; filled in by `vllm`."""
    return {}


def process_state():
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "cores": sorted(os.sched_getaffinity(0)),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, state):
    state["before"] = process_state()
    started = colocated.start(tmp_path_factory.mktemp("model"))
    state["after"] = process_state()
    return started


@pytest.fixture(scope="module")
def engine(vllm):
    made = colocated.engine(vllm)
    made.load_weights(weight_update(colocated.model(), 0))
    return made


def test_starting_leaves_the_process_as_it_was(vllm, state):
    assert state["after"] == state["before"]


def test_greedy_output_is_that_of_transformers_after_updates(engine):
    for version, seed in enumerate((0, 1, 0), start=1):
        policy = colocated.model(seed)
        engine.load_weights(weight_update(policy, version))
        [[short], [long]] = sample(
            engine, request(PROMPT, [0], 20, temperature=0.0), request(LONG, [0], 20, temperature=0.0)
        )
        assert short.token_ids == greedy(policy, PROMPT, 20)
        assert long.token_ids == greedy(policy, LONG, 20)
        assert short.versions == [version] * len(short.token_ids)


def test_log_probs_are_those_of_the_trainer(engine):
    policy = colocated.model(3)
    engine.load_weights(weight_update(policy, 1))
    for prompt, completions in zip(
        (PROMPT, LONG), sample(engine, request(PROMPT, [1, 2, 3]), request(LONG, [4, 5])), strict=True
    ):
        for completion in completions:
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), scored(policy, prompt, completion), atol=1e-4, rtol=0
            )


def test_a_seed_decides_its_completion_among_others(engine):
    seeds = [7, 2**63 - 1, 12345]
    [[alone]] = sample(engine, request(PROMPT, seeds[:1]))
    [together, _] = sample(engine, request(PROMPT, seeds), request(LONG, [1, 2, 3, 4]))
    assert together[0].token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in together}) == 3


def test_completions_end_at_the_end_token_or_the_budget(engine):
    [completions] = sample(engine, request(PROMPT, list(range(24)), 40))
    stopped = [completion for completion in completions if completion.finish == "stop"]
    assert stopped, "24 samples of 40 tokens among about 100: some end"
    for completion in completions:
        assert END not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == END) == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.token_ids) == 40


def test_completions_end_where_the_context_does(engine):
    assert engine.max_context == 256
    [[completion]] = sample(engine, request([5] * 250, [1], 40))
    assert len(completion.token_ids) <= 6
    with pytest.raises(ValueError, match=r"prompt of 256 tokens leaves no room.*context of 256"):
        sample(engine, request([5] * 256, [1]))


def test_finished_completions_are_answered_while_others_go_on(engine):
    finished = []

    async def one(name, each):
        await engine.generate(each)
        finished.append(name)

    async def go():
        with engine.awake():
            await asyncio.gather(one("long", request(PROMPT, [1], 60)), one("short", request(LONG, [2], 2)))

    asyncio.run(go())
    assert finished == ["short", "long"]


def test_a_cancelled_caller_costs_nobody_else(engine):
    [[expected]] = sample(engine, request(LONG, [3], 20))

    async def go():
        with engine.awake():
            gone = asyncio.create_task(engine.generate(request(PROMPT, [1, 2], 60)))
            stays = asyncio.create_task(engine.generate(request(LONG, [3], 20)))
            await asyncio.sleep(0.01)
            gone.cancel()
            return await stays

    [completion] = asyncio.run(go())
    assert completion.token_ids == expected.token_ids
    assert not engine.vllm.has_unfinished_requests()


def test_leaving_early_leaves_nothing_behind(engine):
    async def go():
        with engine.awake():
            task = asyncio.create_task(engine.generate(request(PROMPT, [1], 60)))
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="put to sleep before"):
            await task

    asyncio.run(go())
    assert not engine.vllm.has_unfinished_requests()
    assert sample(engine, request(PROMPT, [1], 4))


def test_sampling_filters_and_further_settings_reach_vllm(engine):
    [[biased]] = sample(engine, request(PROMPT, [5], 12, extra={"logit_bias": {"20": 100.0}}))
    assert biased.token_ids == [20] * 12
    [[top]] = sample(engine, request(PROMPT, [5], 12, top_k=1))
    [[best]] = sample(engine, request(PROMPT, [5], 12, temperature=0.0))
    assert top.token_ids == best.token_ids


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"beams": 3}, "does not know all of generation_kwargs.*beams"), ({"seed": 1}, "may not contain 'seed'")],
)
def test_settings_that_vllm_does_not_know_are_named(engine, extra, message):
    with pytest.raises(ValueError, match=message):
        sample(engine, request(PROMPT, [1], extra=extra))
    assert sample(engine, request(PROMPT, [1], 4))


def test_regex_output_matches_the_regex(vllm, engine):
    import re

    from tests.support import tiny

    constrained = colocated.engine(vllm, regex="[0-9]{3}(yes|no)")
    constrained.load_weights(weight_update(colocated.model(), 1))
    [completions] = sample(constrained, request(PROMPT, [1, 2, 3, 4], 20))
    tokenizer = tiny.tokenizer()
    texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in completions]
    assert all(re.fullmatch("[0-9]{3}(yes|no)", text) for text in texts), texts
    assert constrained.traits.reports_after_cut
    assert not engine.traits.reports_after_cut


def test_sleeping_and_waking_keep_outputs_equal(vllm):
    policy = colocated.model(4)
    for level in (1, 2):
        sleeper = colocated.engine(vllm, sleep_level=level)
        sleeper.load_weights(weight_update(policy, 1))
        first = sample(sleeper, request(PROMPT, [1, 2], 12))
        assert vllm.is_sleeping()
        assert sample(sleeper, request(PROMPT, [1, 2], 12)) == first
    vllm.wake_up()


def test_an_unannounced_tensor_is_named_and_not_sampled_with(vllm):
    from dataclasses import replace

    policy = colocated.model(5)
    good = weight_update(policy, 7)

    def other_shape():
        for place, (name, tensor) in enumerate(good.tensors()):
            yield name, tensor[:1] if place == 3 else tensor

    fresh = colocated.engine(vllm)
    with pytest.raises(RuntimeError, match=rf"version 7 at '{good.specs[2].name}'.*{good.specs[3].name}"):
        fresh.load_weights(replace(good, tensors=other_shape))
    with pytest.raises(RuntimeError, match="vLLM has no weights"):
        sample(fresh, request(PROMPT, [1]))
    fresh.load_weights(good)
    [[completion]] = sample(fresh, request(PROMPT, [0], 10, temperature=0.0))
    assert completion.token_ids == greedy(policy, PROMPT, 10)


def test_memory_is_freed_before_waking_and_after_sleeping(vllm):
    from contextlib import contextmanager

    seen = []

    @contextmanager
    def room():
        seen.append(vllm.is_sleeping())
        yield
        seen.append(vllm.is_sleeping())

    sleeper = colocated.engine(vllm, sleep_level=1, make_room=room)
    sleeper.load_weights(weight_update(colocated.model(), 1))
    sample(sleeper, request(PROMPT, [1], 4))
    assert seen == [True, True]
    vllm.wake_up()


def test_weights_may_come_in_batches(vllm):
    policy = colocated.model(6)
    for batches in (1, 3, 1000):
        engine = colocated.engine(vllm, batches=batches)
        engine.load_weights(weight_update(colocated.model(7), 1))
        engine.load_weights(weight_update(policy, 2))
        [[completion]] = sample(engine, request(PROMPT, [0], 10, temperature=0.0))
        assert completion.token_ids == greedy(policy, PROMPT, 10)
