"""`generation_kwargs` of the built-in engine: what ends a completion, and which tokens may come."""

import asyncio
import math

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import FinishReason
from covey.engines.native.engine import NativeEngine
from covey.engines.native.recurrent_engine import RecurrentEngine
from covey.engines.native.settings import GenerationSettings, read_settings
from tests.engines.native.test_native_engine import PROMPTS
from tests.support import tiny

TOKENIZER = tiny.tokenizer()


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")

    def __len__(self):
        return 256


def sample(model, prompt, extra=None, n=6, interval=None, drafts=None, kind=NativeEngine, **settings):
    """Completions of one prompt, with seeds 0 to n - 1."""
    options = {"pad_token_id": 0, "check_interval": interval} if kind is NativeEngine else {}
    engine = kind(lambda: model, eos_token_ids={1}, max_context=256, tokenizer=TOKENIZER, **options)
    params = SamplingParams(**{"max_tokens": 40, "temperature": 1.5, **settings}, extra=extra or {})
    with engine.awake():
        return asyncio.run(engine.generate(SampleRequest(prompt, n, params, list(range(n)), drafts=drafts)))


def text(completion):
    return TOKENIZER.decode(completion.token_ids)


def up_to(completion, stop):
    """Tokens up to the end of the first `stop`; one token is one character here but for the end token."""
    ids = [token for token in completion.token_ids if token != 1]
    at = TOKENIZER.decode(ids).find(stop)
    return completion.token_ids if at < 0 else ids[: at + len(stop)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "interval"), [(NativeEngine, 1), (NativeEngine, 8), (RecurrentEngine, None)])
def test_stop_text_ends_a_completion_with_its_last_token(tiny_model, kind, interval):
    free = sample(tiny_model, PROMPTS[0], kind=kind)
    stop = text(free[0])[9:11]  # two tokens
    stopped = sample(tiny_model, PROMPTS[0], {"stop": stop}, kind=kind, interval=interval)
    assert [one.token_ids for one in stopped] == [up_to(one, stop) for one in free]
    assert text(stopped[0]).endswith(stop) and stopped[0].finish is FinishReason.STOP
    assert len(stopped[0].logprobs) == len(stopped[0].entropies) == len(stopped[0].token_ids) < 40
    assert stopped[0].logprobs == pytest.approx(free[0].logprobs[: len(stopped[0].logprobs)], abs=1e-5)


def test_requests_with_and_without_stop_texts_share_a_batch(tiny_model):
    free = [sample(tiny_model, prompt, n=2) for prompt in PROMPTS[:2]]
    stop = text(free[0][0])[5:7]
    engine = NativeEngine(lambda: tiny_model, eos_token_ids={1}, pad_token_id=0, tokenizer=TOKENIZER)
    params = [SamplingParams(40, 1.5, extra={"stop_strings": [stop, "never said"]}), SamplingParams(40, 1.5)]

    async def both():
        requests = [SampleRequest(prompt, 2, own, [0, 1]) for prompt, own in zip(PROMPTS, params, strict=False)]
        return await asyncio.gather(*map(engine.generate, requests))

    with engine.awake():
        first, second = asyncio.run(both())
    assert [one.token_ids for one in first] == [up_to(one, stop) for one in free[0]]
    assert [one.token_ids for one in second] == [one.token_ids for one in free[1]]


def test_drafts_are_verified_up_to_a_stop_text(tiny_model):
    extra = {"stop": text(sample(tiny_model, PROMPTS[0])[0])[9:11]}
    fresh = sample(tiny_model, PROMPTS[0], extra)
    drafts = [one.token_ids for one in sample(tiny_model, PROMPTS[0])]  # longer: they continue behind the text
    verified = sample(tiny_model, PROMPTS[0], extra, drafts=drafts)
    assert [one.token_ids for one in verified] == [one.token_ids for one in fresh]
    assert verified[0].reused == len(verified[0].token_ids)


@pytest.mark.parametrize("stop", ["</a>", "→", "b→", "�x"])
def test_stop_texts_are_found_as_soon_as_they_are_whole(stop):
    """Bytes one by one: a text is there with its last byte and not before."""
    ids = list(b"ab\xe2\x86\x92 \xff" + b"x" * 30 + b"y </a></a> z")
    settings = GenerationSettings((stop,), tokenizer=Bytes())
    whole = next(n for n in range(1, len(ids) + 1) if stop in Bytes().decode(ids[:n]))
    assert settings.length_to_stop([], ids) == whole
    for before in (0, 1, whole // 2, whole - 1):
        assert settings.length_to_stop(ids[:before], ids[before:]) == whole - before
    assert settings.length_to_stop([], ids[: whole - 1]) == 0


def test_stop_texts_begin_after_min_tokens():
    settings = GenerationSettings(("ab",), min_tokens=3, tokenizer=Bytes())
    assert settings.length_to_stop([], list(b"ababab")) == 6  # the first two begin within the first three tokens


def test_end_tokens_are_added_or_replaced(tiny_model):
    free = sample(tiny_model, PROMPTS[0])
    token = free[0].token_ids[6]
    cut = [one.token_ids[: [*one.token_ids, token].index(token) + 1] for one in free]
    added = sample(tiny_model, PROMPTS[0], {"stop_token_ids": [token]})
    assert [one.token_ids for one in added] == cut and added[0].finish is FinishReason.STOP
    replaced = sample(tiny_model, PROMPTS[0], {"eos_token_id": token}, n=12)
    assert all(one.token_ids.count(token) <= 1 for one in replaced)
    assert {one.token_ids[-1] for one in replaced if one.finish is FinishReason.STOP} == {token}


def test_min_tokens_hold_the_end_back(tiny_model):
    eager = sample(tiny_model, PROMPTS[0], {"logit_bias": {1: 6.0}})
    assert min(len(one.token_ids) for one in eager) < 8
    held = sample(tiny_model, PROMPTS[0], {"logit_bias": {1: 6.0}, "min_new_tokens": 8})
    assert min(len(one.token_ids) for one in held) == 9  # eight tokens, then the end


def test_logprobs_are_those_of_the_policy(tiny_model):
    """A bias moves what is sampled; the log-prob stays the one that the trainer scores, as with top_p."""
    extra = {"logit_bias": {"9": 4.0}, "presence_penalty": 0.5}
    for one in sample(tiny_model, PROMPTS[0], extra, temperature=1.0, max_tokens=8):
        ids = torch.tensor([PROMPTS[0] + one.token_ids])
        with torch.no_grad():
            scores = tiny_model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert one.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_forbidden_words_and_repeats_do_not_come(tiny_model):
    free = sample(tiny_model, PROMPTS[0], n=12)
    word = text(free[0])[4:6]
    assert word not in text(sample(tiny_model, PROMPTS[0], {"bad_words": [word]}, n=12)[0])
    for one in sample(tiny_model, PROMPTS[0], {"no_repeat_ngram_size": 2}, n=12):
        pairs = list(zip(PROMPTS[0] + one.token_ids, (PROMPTS[0] + one.token_ids)[1:], strict=False))
        assert len(set(pairs)) == len(pairs)


PROMPT, SAMPLED = [5, 6, 7], [8, 5, 6, 7, 8, 5, 6]
LOGITS = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("extra", "theirs"),
    [
        ({"no_repeat_ngram_size": 3}, NoRepeatNGramLogitsProcessor(3)),
        ({"no_repeat_ngram_size": 1}, NoRepeatNGramLogitsProcessor(1)),
        ({"bad_words_ids": [[5, 6, 7], [9], [6, 6, 2]]}, NoBadWordsLogitsProcessor([[5, 6, 7], [9], [6, 6, 2]], [1])),
        (
            {"sequence_bias": [[[5, 6, 7], -3.0], [[7], 1.5], [[4, 7], 9.0]]},
            SequenceBiasLogitsProcessor({(5, 6, 7): -3.0, (7,): 1.5, (4, 7): 9.0}),
        ),
        ({"min_new_tokens": 8}, MinNewTokensLengthLogitsProcessor(3, 8, [1], device="cpu")),
        ({"min_tokens": 7}, MinNewTokensLengthLogitsProcessor(3, 7, [1], device="cpu")),
    ],
)
def test_additions_are_those_of_transformers(extra, theirs):
    settings = read_settings(extra, ends={1})
    ours = settings.add_to(LOGITS, [(PROMPT, SAMPLED)])
    assert settings.reshapes
    torch.testing.assert_close(ours, theirs(torch.tensor([PROMPT + SAMPLED]), LOGITS.clone()))


def test_penalties_count_the_completion_alone():
    """8, 5 and 6 came twice, 7 once: frequency counts that, presence does not; 7 of the prompt counts for neither."""
    settings = read_settings({"presence_penalty": 0.5, "frequency_penalty": 0.25})
    added = settings.add_to(torch.zeros(1, 20), [(PROMPT, SAMPLED)])
    expected = torch.zeros(1, 20)
    expected[0, [5, 6, 8]], expected[0, 7] = -1.0, -0.75
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"num_beams": 4}, "no setting 'num_beams'.*It knows stop, .*, stop_strings"),
        ({"stop": ["a"], "stop_strings": ["b"]}, "has 'stop_strings' and 'stop', two names of one setting"),
        ({"stop": ""}, "stop texts are not empty"),
        ({"stop": [3]}, "stop texts are not empty"),
        ({"logit_bias": {"200": 1.0}}, "token ids are at least 0 and below 104"),
        ({"stop_token_ids": [-1]}, "token ids are at least 0"),
        ({"bad_words_ids": [[]]}, "sequences not empty"),
        ({"logit_bias": {3: math.nan}}, "finite numbers"),
        ({"presence_penalty": math.inf}, "finite numbers"),
        ({"min_tokens": -1}, "counts at least 0"),
        ({"no_repeat_ngram_size": 2.5}, "cannot be read"),
        ({"eos_token_id": "end"}, "cannot be read"),
    ],
)
def test_what_has_no_meaning_is_refused(extra, error):
    with pytest.raises(ValueError, match=rf"generation_kwargs=.*{error}"):
        read_settings(extra, TOKENIZER, {1})
