"""Turns of a conversation: their common prompt is computed once, and what comes out is the same."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.prefill import PrefixStore
from tests.engines.native.test_draft_verification import assert_same
from tests.engines.native.test_native_engine import configs, engine_of

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14]]  # the last one is too short: all but one token of it are kept
RESULT = [20, 21, 22]
EOS = frozenset({1, *range(40, 60)})
PARAMS = SamplingParams(max_tokens=8)


async def conversation(engine, number, sample, hinted, turns=3):
    """A policy that is answered with the same result whatever it said; the completions of its turns."""
    said, completions = list(PROMPTS[number]), []
    for turn in range(turns):
        shared = len(PROMPTS[number]) if hinted else 0
        request = SampleRequest(list(said), 1, PARAMS, [100 * number + 10 * sample + turn], shared=shared)
        (completion,) = await engine.generate(request)
        completions.append(completion)
        said += completion.token_ids + RESULT[: turn + 1]
    return completions


def converse(engine, hinted, samples=3):
    """All conversations at once, [conversation][turn]."""

    async def run():
        return await asyncio.gather(
            *(conversation(engine, number, one, hinted) for number in range(len(PROMPTS)) for one in range(samples))
        )

    with engine.awake():
        return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("forks", [True, False])
def test_stored_prefixes_change_no_sample(tiny_model, rows, forks):
    engine = engine_of(tiny_model, max_sequences=rows, eos=EOS)
    engine._shares_prefixes = forks
    assert_same(converse(engine, hinted=True), converse(engine_of(tiny_model, eos=EOS), hinted=False))


@pytest.mark.slow
@pytest.mark.parametrize("config", configs(), ids=lambda config: config.model_type)
def test_stored_prefixes_change_no_sample_of_other_decoders(config):
    torch.manual_seed(0)
    implementation = "eager" if config.model_type == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    expected = converse(engine_of(model, eos=EOS), hinted=False)
    assert_same(converse(engine_of(model, eos=EOS), hinted=True), expected)


def computed(model, hinted):
    """Token positions that the decoder computed for one conversation of two turns behind a prompt of 6."""
    seen = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    engine = engine_of(model, eos=frozenset())
    engine._shares_prefixes = True  # without the trial at the beginning
    with engine.awake():
        asyncio.run(conversation(engine, 0, 0, hinted, turns=2))
    hook.remove()
    return sum(seen)


@pytest.mark.slow
def test_later_turns_compute_only_tokens_after_the_prompt(tiny_model):
    # 1st turn: 5 tokens of the prompt (the 6th begins decoding) and 8 decoded. 2nd: all but the last of
    # 6 + 8 + 1 tokens and 8 decoded; with the prompt kept all but its first 5 of those.
    assert computed(tiny_model, hinted=False) == 5 + 8 + 14 + 8
    assert computed(tiny_model, hinted=True) == 5 + 8 + 9 + 8


def test_completions_with_equal_prompts_share_the_whole_prompt(tiny_model):
    def two(shared):
        engine = engine_of(tiny_model, eos=EOS)
        first = SampleRequest([5, 6, 7, 8], 1, PARAMS, [1], shared=shared)
        later = SampleRequest([5, 6, 7, 8, 9, 10], 3, PARAMS, [2, 3, 4], shared=shared)

        async def run():
            return [await engine.generate(first), await engine.generate(later)]

        with engine.awake():
            return asyncio.run(run())

    assert_same(two(4), two(0))


@pytest.mark.slow
def test_prefixes_are_released_when_the_engine_sleeps(tiny_model):
    """The policy is trained in between."""
    engine = engine_of(tiny_model, eos=EOS)
    before = converse(engine, hinted=True)
    assert not engine._prefixes.layers
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(0.5)
    after = converse(engine, hinted=True)
    assert_same(after, converse(engine_of(tiny_model, eos=EOS), hinted=False))
    assert [c.token_ids for turns in before for c in turns] != [c.token_ids for turns in after for c in turns]


def test_least_recently_used_prefixes_are_removed_first(tiny_model):
    store = PrefixStore(most_tokens=6)
    prefilled = engine_of(tiny_model)._compute_prompts([[5, 6], [7, 8], [9, 10], list(range(7))])
    store.add((5, 6), prefilled, 0)
    store.add((7, 8), prefilled, 1)
    store.prefilled([(5, 6)])  # used again
    store.add((9, 10), prefilled, 2)
    store.add(tuple(range(7)), prefilled, 3)  # longer than the whole store
    store.trim()
    assert set(store.layers) == {(5, 6), (7, 8), (9, 10)}
    store.add((5, 6, 7), prefilled, 3)
    store.trim()
    assert set(store.layers) == {(9, 10), (5, 6, 7)}
