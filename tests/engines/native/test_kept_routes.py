"""The experts that the built-in engine reports are those that the model chooses, and no sample depends on asking."""

import asyncio
from dataclasses import replace

import pytest
import torch

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.findings import CheckError
from covey.core.routes import differing
from covey.core.routing import routing_of
from covey.engines.native.recurrent_engine import RecurrentEngine
from tests.engines.native.test_native_engine import PROMPTS, engine_of
from tests.support import mixtures, tiny

PARAMS = SamplingParams(max_tokens=10, keep_routes=True)
EOS = frozenset({1, *range(40, 50)})


def requests(params=PARAMS, n=3, **settings):
    return [
        SampleRequest(prompt, n, params, [1000 * i + j for j in range(n)], **settings)
        for i, prompt in enumerate(PROMPTS)
    ]


def sampled(engine, asked):
    async def run():
        return await asyncio.gather(*map(engine.generate, asked))

    with engine.awake():
        return asyncio.run(run())


def own_routes(model, ids):
    """Experts of each token in a pass of the model over all of them, as its routers return them."""
    found = []
    hooks = [
        router.register_forward_hook(lambda _, args, out: found.append(out[2])) for router in routing_of(model).routers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def assert_own(model, asked, answers):
    for request, completions in zip(asked, answers, strict=True):
        for completion in completions:
            fed = request.prompt_ids + completion.token_ids[:-1]
            assert completion.routes.shape[0] == len(fed)
            assert not differing(completion.routes, own_routes(model, fed).to(completion.routes.dtype)).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", mixtures.SETTINGS)
def test_they_are_the_models_own_in_float32(name):
    model = mixtures.model(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
        asked = requests()
        assert_own(model, asked, sampled(engine_of(model, max_sequences=4, eos=EOS), asked))


def test_asking_changes_no_sample_and_no_bit():
    model = mixtures.model("Qwen3Moe")
    plain = sampled(engine_of(model, eos=EOS), requests(replace(PARAMS, keep_routes=False)))
    kept = sampled(engine_of(model, eos=EOS), requests())
    for one, other in zip(plain, kept, strict=True):
        assert [(c.token_ids, c.logprobs) for c in one] == [(c.token_ids, c.logprobs) for c in other]
        assert all(c.routes is None for c in one)


@pytest.mark.slow
def test_they_do_not_depend_on_what_else_is_sampled():
    model, asked = mixtures.model("Mixtral"), requests()
    together = sampled(engine_of(model, eos=EOS), asked)
    others = replace(PARAMS, keep_routes=False)
    mixed = [request if i % 2 else replace(request, params=others) for i, request in enumerate(asked)]
    few = sampled(engine_of(model, max_sequences=2, eos=EOS), mixed)
    for i, (one, other) in enumerate(zip(together, few, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert a.token_ids == b.token_ids
            assert torch.equal(a.routes, b.routes) if i % 2 else b.routes is None


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [None, 0, 3])
def test_drafts_have_the_routes_of_the_tokens_that_they_became(spoil):
    model, asked = mixtures.model("Mixtral"), requests()
    plain = sampled(engine_of(model, eos=EOS), asked)

    def draft(tokens):
        return [token if place != spoil else (token + 1) % 90 for place, token in enumerate(tokens)]

    with_drafts = [
        replace(request, drafts=[draft(c.token_ids) for c in completions])
        for request, completions in zip(asked, plain, strict=True)
    ]
    answers = sampled(engine_of(model, eos=EOS), with_drafts)
    assert sum(c.reused for group in answers for c in group) > 0 or spoil == 0
    assert_own(model, with_drafts, answers)


def test_continued_prompts_have_the_routes_of_what_was_stored():
    model, engine = mixtures.model("Mixtral"), engine_of(mixtures.model("Mixtral"), eos=EOS)
    shared = len(PROMPTS[2])
    silent = replace(PARAMS, keep_routes=False)

    async def run():
        first = SampleRequest(PROMPTS[2], 2, silent, [1, 2], shared=shared)  # stored without routes
        await engine.generate(first)
        asked = [SampleRequest(PROMPTS[2] + [20 + i, 30], 1, PARAMS, [i], shared=shared) for i in range(3)]
        return asked, await asyncio.gather(*map(engine.generate, asked))

    with engine.awake():
        asked, answers = asyncio.run(run())
        assert engine._prefixes.routes
    assert_own(model, asked, answers)
    assert not engine._prefixes.routes


@pytest.mark.slow
def test_the_engine_that_samples_prompt_by_prompt_keeps_them_too():
    model = mixtures.model("Olmoe")
    engine, asked = RecurrentEngine(lambda: model, eos_token_ids=set(EOS), max_context=256), requests()
    assert_own(model, asked, sampled(engine, asked))


def test_models_without_experts_are_refused(tiny_model):
    with pytest.raises(CheckError) as caught:
        sampled(engine_of(tiny_model), requests())
    assert caught.value.codes == ["model-routes"]


def test_256_experts_take_two_bytes():
    model = mixtures.model("Qwen3Moe", num_experts=256)
    asked = requests()[:1]
    answers = sampled(engine_of(model, eos=EOS), asked)
    assert answers[0][0].routes.dtype == torch.int16
    assert_own(model, asked, answers)


@pytest.mark.slow
def test_captured_steps_report_the_experts_of_each_replay():
    """As on a GPU, where a step is recorded once: what it wrote is read after every replay."""
    model, asked = mixtures.model("Mixtral"), requests()
    expected = sampled(engine_of(model, eos=EOS), asked)
    engine = engine_of(model, eos=EOS)
    engine._use_graphs = True

    def capture(step):
        result, engine_routes = step(), engine._step_routes

        def replay():
            again = step()
            result.copy_(again)
            engine_routes.copy_(engine._step_routes)
            engine._step_routes = engine_routes

        return replay, result

    engine._capture = capture
    answers = sampled(engine, asked)
    for one, other in zip(expected, answers, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.token_ids == b.token_ids
            assert not differing(a.routes, b.routes).any()


def test_tiny_models_are_no_mixtures():
    assert routing_of(tiny.model()) is None
