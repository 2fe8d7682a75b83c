"""The native engine: samples that depend on nothing but prompt, seed and weights."""

import asyncio
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from covey.core.engine import RolloutEngine, SampleRequest, SamplingParams
from covey.core.records import FinishReason
from covey.engines.native.engine import NativeEngine
from covey.engines.native.shared_prefix_cache import SharedPrefixCache
from covey.policy.attention import PACKED_ATTENTION
from tests.support import mixtures, tiny

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [20, 21], [30, 31, 32, 33]]


def engine_of(model, max_sequences=16, eos=frozenset({1}), max_context=256):
    return NativeEngine(
        lambda: model, eos_token_ids=set(eos), pad_token_id=0, max_sequences=max_sequences, max_context=max_context
    )


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


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch_size(tiny_model):
    reference = tokens(sample(engine_of(tiny_model, max_sequences=16)))
    assert tokens(sample(engine_of(tiny_model, max_sequences=3))) == reference
    assert tokens(sample(engine_of(tiny_model, max_sequences=1))) == reference


def test_samples_do_not_depend_on_their_neighbours(tiny_model):
    reference = tokens(sample(engine_of(tiny_model)))
    alone = sample(engine_of(tiny_model), prompts=PROMPTS[:1])
    assert tokens(alone)[0] == reference[0]


@pytest.mark.slow
def test_cancelled_requests_are_not_decoded(tiny_model):
    """As where a rollout ran out of time: its row and its request that waits must not hold up the others."""
    engine, params = engine_of(tiny_model, max_sequences=2, eos=frozenset()), SamplingParams(max_tokens=200)

    async def run():
        asked = [SampleRequest(prompt, 1, params, [i]) for i, prompt in enumerate(PROMPTS[:3])]
        late = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        short = SampleRequest([5, 6], 1, SamplingParams(max_tokens=4), [9])
        for _ in range(4):  # two are decoded, the third waits for a place
            await asyncio.sleep(0)
        for one in late:
            one.cancel()
        (answer,) = await engine.generate(short)
        return answer, [len(row.token_ids) for row in engine._running], len(engine._waiting)

    with engine.awake():
        answer, decoded, waiting = asyncio.run(run())
    assert len(answer.token_ids) == 4 and (decoded, waiting) == ([], 0)


def test_another_seed_gives_another_sample(tiny_model):
    (group,) = sample(engine_of(tiny_model), prompts=PROMPTS[:1], n=8)
    assert len({tuple(completion.token_ids) for completion in group}) > 1


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_reported_logprobs_are_the_models_own(tiny_model, temperature):
    for prompt, group in zip(PROMPTS, sample(engine_of(tiny_model), temperature=temperature), strict=True):
        for completion in group:
            logits = tiny_model(torch.tensor([prompt + completion.token_ids])).logits[0] / temperature
            predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = predicted.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


SMALL = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
}


def configs():
    return [
        Qwen2Config(**SMALL),
        Qwen3Config(**SMALL),
        MistralConfig(**SMALL, sliding_window=4),
        Gemma3TextConfig(**SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
        Gemma2Config(**SMALL, sliding_window=4, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    ]


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.model_type)
def test_other_decoders_report_their_own_logprobs(config):
    torch.manual_seed(0)
    implementation = "eager" if config.model_type == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        for prompt, group in zip(PROMPTS, sample(engine_of(model)), strict=True):
            for completion in group:
                predicted = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
                expected = predicted[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", mixtures.SETTINGS)
def test_mixtures_of_experts_sample_what_transformers_would(name):
    """Their own log-probs, and the most probable tokens that `generate` takes one prompt at a time."""
    model = mixtures.model(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not accept a shared prompt")  # DeepSeek caches latents
        for prompt, group in zip(PROMPTS, sample(engine_of(model)), strict=True):
            for completion in group:
                ids = torch.tensor(completion.token_ids)
                predicted = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
                expected = predicted[len(prompt) - 1 : -1].gather(-1, ids[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        answers = sample(engine_of(model), n=1, top_k=1)
    for prompt, [greedy] in zip(PROMPTS, answers, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1)
        assert alone[0, len(prompt) :].tolist() == greedy.token_ids


@pytest.mark.slow
def test_training_attention_does_not_change_samples():
    """Soft-capping and sinks are what SDPA, under which most models sample, does not know."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"] * 2}
    for config in (configs()[-1], GptOssConfig(**SMALL, **experts, sliding_window=4)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, experts_implementation="eager", attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 or "sinks" in name:
                    parameter.normal_(std=0.3)
        expected = sample(engine_of(model))
        model.set_attn_implementation(PACKED_ATTENTION)
        got = sample(engine_of(model))
        assert model.config._attn_implementation == PACKED_ATTENTION
        assert tokens(got) == tokens(expected)
        assert [c.logprobs for group in got for c in group] == [c.logprobs for group in expected for c in group]


def test_an_end_token_ends_a_completion_and_is_kept(tiny_model):
    everything = set(range(104))  # whatever is sampled first ends it
    for group in sample(engine_of(tiny_model, eos=everything)):
        assert all(len(c.token_ids) == 1 and c.finish is FinishReason.STOP for c in group)


def test_without_an_end_token_the_budget_ends_it(tiny_model):
    for group in sample(engine_of(tiny_model, eos=set()), max_tokens=5):
        assert all(len(c.token_ids) == 5 and c.finish is FinishReason.LENGTH for c in group)


def test_the_context_bounds_the_budget(tiny_model):
    (group,) = sample(engine_of(tiny_model, eos=set(), max_context=10), prompts=[[5] * 7], max_tokens=50)
    assert {len(completion.token_ids) for completion in group} == {3}


def test_greedy_equals_generate(tiny_model):
    (group,) = sample(engine_of(tiny_model), prompts=PROMPTS[2:3], n=1, temperature=0.0)
    expected = tiny_model.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=12, do_sample=False)[0, 7:].tolist()
    assert group[0].token_ids == expected


def test_the_first_token_follows_the_exact_distribution(tiny_model):
    n = 3000
    (group,) = sample(engine_of(tiny_model, max_sequences=256), prompts=[[5, 6, 7]], n=n, max_tokens=1)
    probs = tiny_model(torch.tensor([[5, 6, 7]])).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=len(probs)).double()
    common = probs * n >= 5
    statistic = ((counts - probs * n)[common] ** 2 / (probs * n)[common]).sum().item()
    freedom = int(common.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations of a chi-square


def test_model_mode_is_restored(tiny_model):
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    sample(engine_of(tiny_model), prompts=PROMPTS[:1], n=1)
    assert tiny_model.training and not tiny_model.model.layers[0].training


def test_unknown_settings_are_refused(tiny_model):
    with pytest.raises(ValueError, match="typical_p"):
        sample(engine_of(tiny_model), extra={"typical_p": 0.3})


def test_failure_reaches_every_caller_and_the_engine_recovers():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny.model()
            self.fails = True
            self.config = self.inner.config
            self.dtype = self.inner.dtype

        def get_decoder(self):
            return self.inner.get_decoder()

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, **kwargs):
            if self.fails:
                raise RuntimeError("boom")
            return self.inner(**kwargs)

    model = Broken()
    engine = engine_of(model)
    with pytest.raises(RuntimeError, match="boom"):
        sample(engine, prompts=PROMPTS[:2])
    model.fails = False
    assert len(sample(engine, prompts=PROMPTS[:2])) == 2


@pytest.mark.slow
def test_prefill_failure_reaches_every_caller(tiny_model):
    engine = engine_of(tiny_model, max_sequences=2)
    handle = tiny_model.get_decoder().register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample(engine, prompts=PROMPTS)
    handle.remove()
    assert len(sample(engine, prompts=PROMPTS)) == len(PROMPTS)


@pytest.mark.slow
def test_cache_grows_with_running_sequences_not_budgets(tiny_model):
    engine = engine_of(tiny_model, max_sequences=64)
    seen = []

    def look(*args):
        if engine._cache is not None:  # it is not while the engine tries the model's attention
            seen.append((engine._cache.sequence_capacity, engine._cache.capacity))

    tiny_model.register_forward_hook(look)
    sample(engine, prompts=PROMPTS[:2], n=3, max_tokens=200)
    assert max(rows for rows, _ in seen) == 6
    assert seen[0][1] == 64 and max(width for _, width in seen) <= 256  # grows with the rows, not with the budget


@pytest.mark.parametrize("forks", [True, False])
def test_check_interval_changes_no_sample(tiny_model, forks):
    eos = frozenset({1, 40, 41, 42, 43, 44})
    reference = sample(engine_of(tiny_model, eos=eos))
    assert len({len(c.token_ids) for group in reference for c in group}) > 2
    seldom = engine_of(tiny_model, eos=eos, max_sequences=7)
    seldom.check_interval, seldom._shares_prefixes = 5, forks
    got = sample(seldom)
    assert tokens(got) == tokens(reference)
    assert [[c.finish for c in group] for group in got] == [[c.finish for c in group] for group in reference]


@pytest.mark.slow
def test_budgets_settings_and_prompts_mix_in_one_batch(tiny_model):
    settings = [{"max_tokens": 3 + 7 * i, "temperature": 0.7 + 0.3 * (i % 2)} for i in range(len(PROMPTS))]
    alone = [sample(engine_of(tiny_model, eos=set()), [p], **s)[0] for p, s in zip(PROMPTS, settings, strict=True)]
    engine = engine_of(tiny_model, eos=set())

    async def run():
        return await asyncio.gather(
            *(
                engine.generate(SampleRequest(p, 3, SamplingParams(**s), [0, 1, 2]))
                for p, s in zip(PROMPTS, settings, strict=True)
            )
        )

    with engine.awake():
        assert tokens(asyncio.run(run())) == tokens(alone)


@pytest.mark.slow
def test_models_without_shared_prefixes_sample_correctly(tiny_model):
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        vocab_size=104,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=128,
        attention_types=[[["global"], 2]],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = engine_of(model)
    with pytest.warns(UserWarning, match="GPTNeoForCausalLM decodes with a copy") as said:
        answers = sample(engine)
        sample(engine)
    assert len([w for w in said if "copy of the prompt" in str(w.message)]) == 1
    for prompt, group in zip(PROMPTS, answers, strict=True):
        for completion in group:
            predicted = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
            expected = predicted[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    assert engine._shares_prefixes is False


def test_ordinary_models_share_prefixes(tiny_model):
    engine = engine_of(tiny_model)
    sample(engine)
    assert engine._shares_prefixes is True


@pytest.mark.slow
def test_the_cache_grows_and_moves_with_long_completions(tiny_model):
    engine = engine_of(tiny_model, eos=set(), max_sequences=3)
    longer = sample(engine, n=2, max_tokens=150)
    assert tokens(longer) == tokens(sample(engine_of(tiny_model, eos=set()), n=2, max_tokens=150))


def test_prompts_are_shared_in_mixed_precision_too(tiny_model):
    engine = NativeEngine(
        lambda: tiny_model,
        eos_token_ids={1},
        pad_token_id=0,
        forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    with torch.no_grad():  # so that bfloat16 moves logits by more than an exact check would pass
        tiny_model.get_output_embeddings().weight.mul_(4)
    with engine.awake():
        assert isinstance(engine._new_cache(), SharedPrefixCache)


def test_mixed_weight_dtypes_are_sampled_under_autocast(tiny_model):
    """So are weights that are gathered from shares."""
    for parameter in tiny_model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16()
    engine = NativeEngine(
        lambda: tiny_model,
        eos_token_ids={1},
        pad_token_id=0,
        forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    assert all(len(group) == 3 for group in sample(engine))
