"""Drafts: they change what is computed, never what comes out."""

import asyncio
import math
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native import engine as native
from tests.engines.native.test_native_engine import PROMPTS, configs, engine_of

N, LIMIT = 3, 12
EOS = frozenset({1, 40, 41, 42, 43, 44})  # frequent enough that some completions stop


def answers(model, drafts=None, max_sequences=16, forks=None, lenience=None, draft_logprobs=None, eos=EOS, **settings):
    """Completions of every prompt, [prompt][seed]."""
    engine = engine_of(model, max_sequences=max_sequences, eos=eos)
    engine._shares_prefixes = forks
    params = SamplingParams(**{"max_tokens": LIMIT, **settings})

    async def run():
        requests = [
            SampleRequest(
                prompt,
                N,
                params,
                [1000 * i + j for j in range(N)],
                drafts=drafts and drafts[i],
                draft_logprobs=draft_logprobs and draft_logprobs[i],
                draft_lenience=lenience,
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    with engine.awake():
        return asyncio.run(run())


def each(groups, of):
    return [[of(completion) for completion in group] for group in groups]


def assert_same(got, expected):
    assert each(got, lambda c: c.token_ids) == each(expected, lambda c: c.token_ids)
    assert each(got, lambda c: c.finish) == each(expected, lambda c: c.finish)
    for a, b in zip(chain(*got), chain(*expected), strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(a.entropies), torch.tensor(b.entropies), atol=1e-4, rtol=0)


def spoiled(tokens, at):
    return [token if i != at else (token + 1) % 104 for i, token in enumerate(tokens)]


DRAFTS = {
    "perfect": lambda tokens: tokens,
    "half": lambda tokens: tokens[: len(tokens) // 2],
    "wrong at 2": lambda tokens: spoiled(tokens, 2),
    "wrong at once": lambda tokens: spoiled(tokens, 0),
    "garbage": lambda tokens: [(7 * i + 3) % 104 for i in range(LIMIT)],
    "too long": lambda tokens: tokens + [9] * 20,
    "an end token early": lambda tokens: [*tokens[:2], 40, *tokens[2:]],
    "empty": lambda tokens: [],
    "none": lambda tokens: None,
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_never_changes_a_completion(tiny_model, kind):
    expected = answers(tiny_model)
    assert {c.finish.value for group in expected for c in group} == {"stop", "length"}
    drafts = each(expected, lambda c: DRAFTS[kind](c.token_ids))
    assert_same(answers(tiny_model, drafts), expected)


@pytest.mark.slow
def test_mixed_drafts_in_small_batches_change_no_completion(tiny_model):
    expected = answers(tiny_model)
    kinds = list(DRAFTS.values())
    drafts = [
        [kinds[(3 * i + j) % len(kinds)](completion.token_ids) for j, completion in enumerate(group)]
        for i, group in enumerate(expected)
    ]
    for max_sequences in (1, 4, 16):
        assert_same(answers(tiny_model, drafts, max_sequences), expected)


def test_forward_passes_respect_their_token_limit(tiny_model, monkeypatch):
    expected = answers(tiny_model)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 20)
    monkeypatch.setattr("covey.engines.native.prefill.MOST_LOGITS", 3 * 104)
    widths = []
    tiny_model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    assert_same(answers(tiny_model, each(expected, lambda c: c.token_ids)), expected)
    assert max(widths) <= 20


def test_reused_tokens_are_counted(tiny_model):
    expected = answers(tiny_model)
    lengths = each(expected, lambda c: len(c.token_ids))
    whole = answers(tiny_model, each(expected, lambda c: c.token_ids))
    assert each(whole, lambda c: c.reused) == lengths
    from_two = answers(tiny_model, each(expected, lambda c: spoiled(c.token_ids, 2)))
    assert each(from_two, lambda c: c.reused) == [[min(2, n) for n in group] for group in lengths]
    assert not any(chain(*each(expected, lambda c: c.reused)))


def test_perfect_draft_costs_one_forward_pass(tiny_model):
    expected = answers(tiny_model)
    drafts = each(expected, lambda c: c.token_ids)
    passes = []
    tiny_model.get_decoder().register_forward_hook(lambda *args: passes.append(1))
    answers(tiny_model, drafts, forks=True)
    assert len(passes) == 2  # the prompts, the drafts


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.3}]
)
def test_drafts_work_with_all_sampling_settings(tiny_model, settings):
    expected = answers(tiny_model, **settings)
    drafts = each(expected, lambda c: spoiled(c.token_ids, 4))
    assert_same(answers(tiny_model, drafts, **settings), expected)


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("config", configs(), ids=lambda config: config.model_type)
def test_drafts_work_with_every_decoder_and_cache(config, forks):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    expected = answers(model, forks=not forks)
    drafts = each(expected, lambda c: spoiled(c.token_ids, 3))
    assert_same(answers(model, drafts, forks=forks), expected)


def lenient(model, expected, lenience, shift=0.0):
    drafts = each(expected, lambda c: c.token_ids)
    then = each(expected, lambda c: [logprob + shift for logprob in c.logprobs])
    return answers(model, drafts, lenience=lenience, draft_logprobs=then)


def test_lenient_acceptance_at_both_extremes(tiny_model):
    expected = answers(tiny_model)
    assert_same(lenient(tiny_model, expected, 1.01), expected)  # p_now = p_then: accepted with probability 1
    kept = lenient(tiny_model, expected, 1.01, shift=math.log(1e9))
    assert not any(chain(*each(kept, lambda c: c.reused)))  # now a billion times less probable: never
    assert_same(kept, expected)  # and from the first token on the policy's own race


@pytest.mark.slow
def test_lenience_is_the_probability_of_acceptance(tiny_model):
    prompt, n = [5, 6, 7], 4000
    engine = engine_of(tiny_model, max_sequences=256)
    engine._shares_prefixes = True
    with engine.awake():
        logprobs = [tiny_model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[20].item()]
        request = SampleRequest(
            prompt, n, SamplingParams(max_tokens=1), list(range(n)), None, [[20]] * n, [logprobs] * n, 0.3
        )
        completions = asyncio.run(engine.generate(request))
    accepted = sum(c.reused for c in completions)
    # 0.3 of the draft's token, or else a draw: one that is the draft's own by chance counts as a draw.
    assert abs(accepted / n - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5 + math.exp(logprobs[0])


def test_lenience_without_recorded_logprobs_is_refused(tiny_model):
    with pytest.raises(ValueError, match="draft_logprobs"):
        answers(tiny_model, [[[5]] * N] * len(PROMPTS), lenience=1.0)


def test_drafts_must_match_the_seeds(tiny_model):
    with pytest.raises(ValueError, match="1 lists for 3 seeds"):
        answers(tiny_model, [[[5]]] * len(PROMPTS))
