"""The engine for models with a running state: the native engine's samples where both can, and the model's own."""

import asyncio

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.core.records import FinishReason
from covey.engines.native.engine import NativeEngine
from covey.engines.native.recurrent_engine import RecurrentEngine, needs_recurrent_engine
from tests.support import hybrids, tiny

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]]


def engine_of(model, max_sequences=16, eos=frozenset({1}), max_context=256):
    return RecurrentEngine(lambda: model, eos_token_ids=set(eos), max_sequences=max_sequences, max_context=max_context)


def sample(engine, prompts=PROMPTS, n=3, **settings):
    params = SamplingParams(**{"max_tokens": 12, **settings})

    async def run():
        requests = [
            SampleRequest(prompt, n, params, [1000 * i + j for j in range(n)]) for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    with engine.awake():
        return asyncio.run(run())


def tokens(answers):
    return [[completion.token_ids for completion in group] for group in answers]


def test_it_is_a_rollout_engine(tiny_model):
    assert isinstance(engine_of(tiny_model), RolloutEngine)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 20}, {"repetition_penalty": 1.3}])
def test_samples_equal_the_native_engines(tiny_model, settings):
    ends = set(range(1, 30))  # rows leave at different times
    native = NativeEngine(lambda: tiny_model, eos_token_ids=ends, pad_token_id=0)
    expected = sample(native, n=6, **settings)
    assert tokens(sample(engine_of(tiny_model, eos=ends), n=6, **settings)) == tokens(expected)
    lengths = {len(completion.token_ids) for group in expected for completion in group}
    assert len(lengths) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*hybrids.SETTINGS, *hybrids.MASKED_WHOLE])
def test_reported_logprobs_are_the_models_own(name):
    model = hybrids.model(name)
    for prompt, group in zip(PROMPTS, sample(engine_of(model, eos=set(range(1, 15)))), strict=True):
        for completion in group:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
            predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = predicted.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lfm2", "Qwen3Next"])
def test_samples_do_not_depend_on_the_batch(name):
    model, ends = hybrids.model(name), set(range(1, 20))
    reference = tokens(sample(engine_of(model, eos=ends), n=4))
    assert tokens(sample(engine_of(model, eos=ends, max_sequences=1), n=4)) == reference
    assert tokens(sample(engine_of(model, eos=ends), prompts=PROMPTS[:1], n=4)) == reference[:1]


def test_the_context_bounds_the_budget(tiny_model):
    ((completion,),) = sample(engine_of(tiny_model, eos=(), max_context=8), prompts=[[5, 6, 7]], n=1)
    assert len(completion.token_ids) == 5 and completion.finish is FinishReason.LENGTH


def test_models_that_need_the_recurrent_engine():
    assert all(needs_recurrent_engine(hybrids.model(name)) for name in {**hybrids.SETTINGS, **hybrids.MASKED_WHOLE})
    assert not needs_recurrent_engine(tiny.model())
    assert not needs_recurrent_engine(MistralForCausalLM(MistralConfig(**hybrids.SIZES, sliding_window=4)))
