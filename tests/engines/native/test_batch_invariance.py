"""A completion's tokens and log-probs have the same bits, whatever is sampled beside it and whenever it is asked for.

Whatever a processor's kernels do must not show: where rows of its products differ by their number, they are filled up.
`test_row_counts.py` imitates processors of other kinds.
"""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.adapter_engine import AdapterEngine
from covey.engines.native.engine import NativeEngine
from covey.engines.native.recurrent_engine import RecurrentEngine
from tests.engines.native.test_fused_step import KNOWN, OTHERS, random_model
from tests.support import hybrids, tiny

PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def native(model, kind=NativeEngine, **settings):
    settings = {"eos_token_ids": {1, 40, 41, 42}, "pad_token_id": 0, "max_sequences": 32, **settings}
    return kind(lambda: model, **settings)


def requests(lengths=(1, 5, 9, 3, 17), n=3, **settings):
    prompts = [[4 + (7 * i + j * j) % 70 for j in range(length)] for i, length in enumerate(lengths)]
    return [
        SampleRequest(prompt, n, PARAMS, [1000 * i + j for j in range(n)], **settings)
        for i, prompt in enumerate(prompts)
    ]


def single(request):
    """One request for each completion."""
    drafts = request.drafts or [None] * request.n
    return [
        replace(request, n=1, seeds=[seed], drafts=[draft] if request.drafts else None)
        for seed, draft in zip(request.seeds, drafts, strict=True)
    ]


async def together(engine, asked):
    return await asyncio.gather(*map(engine.generate, asked))


async def one_by_one(engine, asked):
    return [await engine.generate(request) for request in asked]


async def each_alone(engine, asked):
    return [[(await engine.generate(one))[0] for one in single(request)] for request in asked]


async def late(engine, asked):
    async def after(steps, request):
        for _ in range(steps):
            await asyncio.sleep(0)
        return await engine.generate(request)

    return await asyncio.gather(*(after(3 * i, request) for i, request in enumerate(asked)))


WAYS = [one_by_one, each_alone, late]


def sampled(engine, way, asked):
    with engine.awake(), torch.no_grad():
        found = asyncio.run(way(engine, asked))
    return [(c.token_ids, c.logprobs, c.entropies, c.reused) for group in found for c in group]


def assert_invariant(make, asked, ways=WAYS):
    expected = sampled(make(), together, asked)
    assert len({tuple(tokens) for tokens, *_ in expected}) > 1
    for way in ways:
        for one, other in zip(sampled(make(), way, asked), expected, strict=True):
            assert one == other, way.__name__
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama, biases", "mistral, window of 4", "qwen3"])
def test_fused_steps(name):
    model = random_model(KNOWN[name])
    assert_invariant(lambda: native(model), requests())


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_steps_of_the_model(name):
    model = random_model(OTHERS[name])
    assert_invariant(lambda: native(model), requests(n=2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8", marks=pytest.mark.slow), "bfloat16"])
def test_rounded_weights_and_inputs(dtype):
    model = tiny.model()
    assert_invariant(lambda: native(model, dtype=dtype), requests(n=2))


@pytest.mark.slow
def test_rounded_weights_with_drafts_and_adapters():
    model = tiny.model()
    drafts = [[[5, 6, 7], None, [40]]] * 5
    asked = [replace(x, drafts=draft) for x, draft in zip(requests(), drafts, strict=True)]
    assert_invariant(lambda: native(model, dtype="int8"), asked)
    adapters = {"a": low_rank(model, 1, 0), "b": low_rank(model, 8, 1)}
    asked = [replace(x, adapter=name) for x, name in zip(requests(), ["a", "b", None, "a", "b"], strict=True)]
    assert_invariant(lambda: native(model, AdapterEngine, adapters=lambda: adapters, dtype="int8"), asked)


@pytest.mark.slow
def test_half_precision():
    model = tiny.model().bfloat16()
    assert_invariant(lambda: native(model), requests(n=2))


@pytest.mark.slow
def test_one_survivor_of_uneven_lengths():
    model = tiny.model()
    asked = [replace(x, params=SamplingParams(4 + 12 * i)) for i, x in enumerate(requests(n=2))]
    found = assert_invariant(lambda: native(model, eos_token_ids=set()), asked)
    assert sorted({len(tokens) for tokens, *_ in found}) == [4, 16, 28, 40, 52]


@pytest.mark.slow
def test_slots_that_others_leave():
    model = tiny.model()
    asked = requests()
    assert sampled(native(model, max_sequences=2), together, asked) == sampled(native(model), together, asked)


@pytest.mark.slow
def test_long_prompts():
    # beyond the chunks of attention's sums (256 columns) and the rows of one product (256)
    model = tiny.model(max_position_embeddings=1024)
    asked = [replace(x, params=SamplingParams(6)) for x in requests((300, 20, 700, 257, 3), n=2)]
    assert_invariant(lambda: native(model), asked)


@pytest.mark.slow
def test_long_completions():
    model = tiny.model(max_position_embeddings=1024)
    asked = [replace(x, params=SamplingParams(40 + 230 * (i == 1))) for i, x in enumerate(requests((5, 3), n=1))]
    found = assert_invariant(lambda: native(model, eos_token_ids=set()), asked, [each_alone])
    assert max(len(tokens) for tokens, *_ in found) == 270


def conversations(asked, turns=3):
    """The same requests turn by turn: each prompt followed by what was sampled and by what a tool says."""

    def of(engine, way):
        found, prompts = [], [(x, x.prompt_ids) for request in asked for x in single(request)]
        for turn in range(turns):
            again = [
                replace(x, prompt_ids=ids, seeds=[x.seeds[0] + turn], shared=len(x.prompt_ids)) for x, ids in prompts
            ]
            with torch.no_grad():
                answers = [c for group in asyncio.run(way(engine, again)) for c in group]
            found += [(c.token_ids, c.logprobs) for c in answers]
            prompts = [(x, [*ids, *c.token_ids, 5, 6, 7 + turn]) for (x, ids), c in zip(prompts, answers, strict=True)]
        return found

    return of


@pytest.mark.slow
@pytest.mark.parametrize("stored", [1 << 14, 0], ids=["stored prefixes", "prefixes computed again"])
def test_conversations(stored):
    model, play = tiny.model(), conversations(requests())
    found = []
    for way in (together, one_by_one, late):
        engine = native(model)
        if way is not together:
            engine._prefixes.most_tokens = stored
        with engine.awake():
            found.append(play(engine, way))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("lenience", [None, 0.8])
def test_drafts(lenience):
    model = tiny.model()
    asked = requests()
    old = sampled(native(tiny.model(seed=1)), together, asked)
    near = sampled(native(model), together, asked)
    drafts = [tokens if i % 3 else near[i][0][:7] + tokens for i, (tokens, *_) in enumerate(old)]
    settings = {"draft_lenience": lenience}
    drafted = []
    for i, request in enumerate(asked):
        own = drafts[3 * i : 3 * i + 3]
        if lenience is not None:
            settings["draft_logprobs"] = [[-6.0] * len(draft) for draft in own]
        drafted.append(replace(request, drafts=own, **settings))
    ways = [one_by_one, late] + ([each_alone] if lenience is None else [])
    found = assert_invariant(lambda: native(model), drafted, ways)
    assert sum(reused for *_, reused in found) > 10


def low_rank(model, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    names = ("q_proj", "v_proj", "down_proj")
    return {
        name: (
            torch.randn(rank, layer.in_features, generator=generator),
            torch.randn(layer.out_features, rank, generator=generator),
        )
        for name, layer in model.named_modules()
        if name.endswith(names)
    }


@pytest.mark.slow
def test_adapters_of_several_ranks_in_one_batch():
    model = tiny.model()
    adapters = {"a": low_rank(model, 1, 0), "b": low_rank(model, 8, 1), "c": low_rank(model, 3, 2)}
    asked = [replace(x, adapter=name) for x, name in zip(requests(), ["a", "b", None, "c", "b"], strict=True)]
    assert_invariant(lambda: native(model, AdapterEngine, adapters=lambda: adapters), asked)


@pytest.mark.slow
def test_an_adapter_of_peft():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny.model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    assert_invariant(lambda: native(model.eval()), requests())


@pytest.mark.slow
@pytest.mark.parametrize("name", hybrids.SETTINGS)
def test_models_with_a_state(name):
    if torch.get_num_threads() > 1:
        pytest.skip("exact on one thread; on several a run says that it is exact up to rounding")
    model = hybrids.model(name)
    engine = RecurrentEngine(lambda: model, eos_token_ids={1, 40, 41}, max_sequences=8)
    assert_invariant(lambda: engine, requests((4, 9), n=3), [each_alone])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"top_k": 7}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.05}])
def test_filters(settings):
    model = tiny.model(vocab_size=157)
    asked = [replace(x, params=replace(PARAMS, **settings)) for x in requests(n=2)]
    assert_invariant(lambda: native(model), asked)


@pytest.mark.slow
def test_attention_of_the_model_itself():
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        vocab_size=104, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=128,
        attention_types=[[["global"], 2]], bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert_invariant(lambda: native(model), requests(n=2))
