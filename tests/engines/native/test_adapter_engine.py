"""Sequences of several adapters in one decode batch."""

import asyncio
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.core.batch import collate
from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.adapter_engine import AdapterEngine, AdapterRows
from covey.engines.native.engine import NativeEngine
from covey.policy.adapters import base_model, low_rank_matrices
from covey.policy.scoring import TokenScorer
from tests.policy.test_scoring import rollouts
from tests.support import tiny

SETTINGS = {"eos_token_ids": {1}, "pad_token_id": 0, "max_context": 256}
VARIANTS = {"a": (2, 4, ["q_proj", "v_proj"]), "b": (8, 2, "all-linear"), "new": (4, 8, ["o_proj"])}


def adapted(name, base):
    rank, alpha, targets = VARIANTS[name]
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
    torch.manual_seed(rank)
    if name != "new":  # else it changes nothing
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.2)
    return model


def sampled(engine, requests):
    async def all_of_them():
        with engine.awake():
            return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(all_of_them())


def request(adapter, prompt, n=3, **settings):
    seeds = [hash((tuple(prompt), i)) % 2**31 for i in range(n)]
    return SampleRequest(prompt, n, SamplingParams(12), seeds, adapter=adapter, **settings)


@pytest.fixture(scope="module")
def base():
    return tiny.model()


@pytest.fixture(scope="module")
def variants(base):
    return {name: adapted(name, base) for name in VARIANTS}


def mixing(base, variants, **settings):
    adapters = {name: low_rank_matrices(model) for name, model in variants.items()}
    return AdapterEngine(lambda: base, adapters=lambda: adapters, **SETTINGS, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("max_sequences", [64, 5])  # 5: sequences leave and others take their places
def test_a_mixed_batch_samples_as_each_adapter_alone(base, variants, max_sequences):
    prompts = [[7, 8, 9, 10], [11, 12], [20, 21, 22, 23, 24]]
    wanted = [(name, prompt) for prompt in prompts for name in (*VARIANTS, None)]
    mixed = sampled(mixing(base, variants, max_sequences=max_sequences), [request(*one) for one in wanted])
    distinct = set()
    for (name, prompt), completions in zip(wanted, mixed, strict=True):
        model = base if name is None else variants[name]
        [alone] = sampled(NativeEngine(lambda model=model: model, **SETTINGS), [request(None, prompt)])
        for one, other in zip(completions, alone, strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=1e-4)
        distinct.add(str([one.token_ids for one in completions]))
    assert len(distinct) == 3 * len(prompts)  # "new" samples as the model alone, "a" and "b" do not


@pytest.mark.slow
def test_drafts_are_verified_under_their_own_adapter(base, variants):
    prompts = {name: [30 + i, 31, 32] for i, name in enumerate(("a", "b"))}
    engine = mixing(base, variants)
    first = sampled(engine, [request(name, prompt) for name, prompt in prompts.items()])
    drafts = [[one.token_ids for one in completions] for completions in first]
    again = sampled(engine, [request(n, p, drafts=d) for (n, p), d in zip(prompts.items(), drafts, strict=True)])
    for completions, drafted in zip(again, drafts, strict=True):
        assert [one.token_ids for one in completions] == drafted
        assert all(one.reused >= len(tokens) - 1 for one, tokens in zip(completions, drafted, strict=True))


@pytest.mark.slow
def test_a_stored_prompt_is_continued_without_any_adapter(base, variants):
    engine, turns = mixing(base, variants), ([7, 8, 9], [7, 8, 9, 10, 11])

    async def two_turns():
        with engine.awake():
            for prompt in turns:
                wanted = [request(name, prompt, n=1, shared=3) for name in VARIANTS]
                found = await asyncio.gather(*map(engine.generate, wanted))
        return found

    for name, [completion] in zip(VARIANTS, asyncio.run(two_turns()), strict=True):
        alone = NativeEngine(lambda model=variants[name]: model, **SETTINGS)
        [[expected]] = sampled(alone, [request(None, turns[1], n=1)])
        assert completion.token_ids == expected.token_ids


def test_an_unknown_adapter_is_named(base, variants):
    with pytest.raises(ValueError, match=r"no adapter 'c'.*'a', 'b', 'new'"):
        sampled(mixing(base, variants), [request("c", [7, 8])])


def test_layers_are_themselves_again_after_sampling(base, variants):
    sampled(mixing(base, variants), [request("b", [7, 8])])
    assert not any("forward" in vars(module) for module in base.modules())


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_one_adapter_of_all_rows_may_be_on_the_head(layout):
    base = tiny.model(tie_word_embeddings=False)
    model = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    )
    batch = collate(rollouts())
    with torch.no_grad():
        expected = TokenScorer(base_model, temperature=1.0, layout=layout)(model, batch, top=2)
        rows = AdapterRows()
        with rows.added(base, {"a": low_rank_matrices(model), "b": low_rank_matrices(adapted("b", base))}):
            rows.select(["a"] * (len(batch) if layout == "padded" else 1))
            scorer = TokenScorer(lambda m: m, temperature=1.0, layout=layout, chunk_size=3)
            scores = scorer(base, batch, top=2)
            rows.select(["a", "b"])
            with pytest.raises(RuntimeError, match="rows for 2 sequences"):
                scorer(base, batch)
    assert torch.equal(scores.top_ids, expected.top_ids)
    torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
