"""Speculative reuse: what is remembered, what an engine is given, and what comes out."""

import math
import random
from array import array
from contextlib import nullcontext

import pytest
import torch

from covey.core.engine import SamplingParams
from covey.core.records import Completion, FinishReason, Rollout
from covey.core.stats import Mean
from covey.rollout.collector import Collector, PromptSample
from covey.rollout.prompts import PromptCodec
from covey.rollout.speculation import Speculation, fingerprint, reuse_stats

PARAMS = SamplingParams(max_tokens=12)
EOS = 1


def store(max_tokens=100, with_logprobs=True):
    return Speculation(max_tokens, 1.0 if with_logprobs else None)


def key(prompt, sample=0, tokens=(7,)):
    return prompt, fingerprint(tokens), sample


# ---- the store -------------------------------------------------------------------------------------------------------


def test_the_last_completion_is_kept():
    drafts = store()
    drafts.put(key(3), [5, 6], [-1.0, -2.0])
    drafts.put(key(3), [5, 8, 9], [-1.0, -0.5, -0.25])
    assert drafts._drafts.get(key(3)).token_ids == array("i", [5, 8, 9])
    assert drafts._drafts.get(key(3)).logprobs == array("f", [-1.0, -0.5, -0.25])
    assert (len(drafts._drafts), drafts.num_tokens) == (1, 3)


def test_drafts_are_keyed_by_prompt_text_and_sample_index():
    drafts = store()
    drafts.put(key(3, 0, (7, 8)), [5], [-1.0])
    assert drafts._drafts.get(key(4, 0, (7, 8))) is None
    assert drafts._drafts.get(key(3, 1, (7, 8))) is None
    assert drafts._drafts.get(key(3, 0, (8, 7))) is None
    assert drafts._drafts.get(key(3, 0, (7, 8))) is not None


def test_the_oldest_completions_make_room():
    drafts = store(max_tokens=5)
    for prompt in (0, 1):
        drafts.put(key(prompt), [9, 9], [-1.0, -1.0])
    drafts.put(key(0), [9, 9], [-1.0, -1.0])  # sampled again: now prompt 1 is the oldest
    drafts.put(key(2), [9, 9], [-1.0, -1.0])  # 6 tokens: one too many
    assert [drafts._drafts.get(key(prompt)) is None for prompt in (0, 1, 2)] == [False, True, False]
    assert drafts.num_tokens == 4


def test_a_completion_larger_than_the_store_is_not_kept():
    drafts = store(max_tokens=2)
    drafts.put(key(0), [9, 9, 9], [-1.0] * 3)
    assert (len(drafts._drafts), drafts.num_tokens) == (0, 0)


def test_without_the_log_probs_it_needs_a_completion_is_not_kept():
    drafts = store(with_logprobs=True)
    drafts.put(key(0), [9], [-1.0])
    drafts.put(key(0), [8], None)
    assert drafts._drafts.get(key(0)) is None
    assert drafts.num_tokens == 0


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_a_store_goes_through_a_checkpoint_unchanged(tmp_path, with_logprobs):
    drafts = store(8, with_logprobs)
    third = torch.tensor(1 / 3).item()  # a float32, as engines report
    for prompt, length in ((5, 3), (2, 0), (9, 1), (5, 2)):
        drafts.put(key(prompt), range(4, 4 + length), [-third * i for i in range(length)])
    torch.save(drafts.state_dict(), tmp_path / "state.pt")
    again = store(8, with_logprobs)
    again.put(key(77), [1], [-1.0])
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again._drafts == drafts._drafts
    assert list(again._drafts) == list(drafts._drafts) == [key(2), key(9), key(5)], "age is kept too"
    assert again.num_tokens == drafts.num_tokens == 3


# ---- what an engine is given -----------------------------------------------------------------------------------------


class Markov:
    """A policy in which the last token decides, sampled by a race of random numbers per (seed, position, token).

    Attributes:
        likes: [V, V] how probable each token is after another, up to a factor.
        requests: all it was asked for.
        verifies: whether drafts are checked.
    """

    vocabulary = range(1, 12)

    def __init__(self, seed=0, verifies=True):
        source = random.Random(seed)
        self.likes = {a: {b: source.random() ** 4 for b in self.vocabulary} for a in range(200)}
        self.verifies = verifies
        self.requests = []

    def shift(self, how_much):
        """Another policy, more unlike the more."""
        other = Markov(seed=99).likes
        self.likes = {
            a: {b: (1 - how_much) * p + how_much * other[a][b] for b, p in row.items()} for a, row in self.likes.items()
        }

    async def generate(self, request):
        self.requests.append(request)
        drafts = request.drafts if request.drafts and self.verifies else [None] * request.n
        return [self.complete(request, *pair) for pair in zip(request.seeds, drafts, strict=True)]

    def complete(self, request, seed, draft):
        tokens, reused, holds = [], 0, True
        last = request.prompt_ids[-1]
        while len(tokens) < request.params.max_tokens and (not tokens or last != EOS):
            last = self.winner(last, seed, len(tokens))
            holds = holds and draft is not None and len(tokens) < len(draft) and draft[len(tokens)] == last
            reused += holds
            tokens.append(last)
        finish = FinishReason.STOP if last == EOS else FinishReason.LENGTH
        return Completion(tokens, [-1.0] * len(tokens), finish, reused=reused)

    def winner(self, last, seed, step):
        noise = random.Random(f"{seed}/{step}")
        return min(self.vocabulary, key=lambda token: -math.log(1 - noise.random()) / self.likes[last][token])

    def load_weights(self, update):
        pass

    def awake(self):
        return nullcontext()


def draws(prompts, group=3, texts="abcdef"):
    return [PromptSample({"prompt": texts[p]}, p, s) for p in prompts for s in range(group)]


def collector(tiny_tokenizer, engine):
    return Collector(engine, PromptCodec(tiny_tokenizer, None, None), seed=7)


def tokens(rollouts):
    return [rollout.completion_ids for rollout in rollouts]


def share(rollouts):
    return sum(r.reused for r in rollouts) / sum(len(r.completion_ids) for r in rollouts)


def test_an_unchanged_policy_reuses_every_token(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, Markov()).collect, Speculation(1000)
    first = collect(draws([0, 1, 2]), PARAMS, ("train", 0), reuse)
    second = collect(draws([2, 0, 1]), PARAMS, ("train", 1), reuse)  # another order, another rollout batch
    assert tokens(second) == tokens(first)[6:] + tokens(first)[:6]
    assert (share(first), share(second)) == (0.0, 1.0)


@pytest.mark.parametrize("change", [0.02, 0.2, 1.0])
def test_drafts_do_not_change_the_samples_of_a_changed_policy(tiny_tokenizer, change):
    outcomes = []
    for verifies in (True, False):
        engine, reuse = Markov(verifies=verifies), Speculation(1000)
        collect = collector(tiny_tokenizer, engine).collect
        collect(draws(range(6)), PARAMS, ("train", 0), reuse)
        engine.shift(change)
        outcomes.append(collect(draws(range(6)), PARAMS, ("train", 1), reuse))
    assert tokens(outcomes[0]) == tokens(outcomes[1])
    assert 0 < share(outcomes[0]) < 1
    assert share(outcomes[1]) == 0


def test_siblings_have_random_numbers_of_their_own(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, engine := Markov()).collect, Speculation(1000)
    collect(draws([0, 1]), PARAMS, ("train", 0), reuse)
    assert len({seed for request in engine.requests for seed in request.seeds}) == 6


def test_a_draft_is_found_only_where_prompt_place_and_text_agree(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, engine := Markov()).collect, Speculation(1000)
    collect(draws([0, 1], group=2), PARAMS, ("train", 0), reuse)
    collect(draws([0], group=3), PARAMS, ("train", 1), reuse)  # one sibling more
    collect(draws([1], group=2, texts="axcdef"), PARAMS, ("train", 2), reuse)  # another dataset
    collect(draws([3], group=2, texts="bbbbbb"), PARAMS, ("train", 3), reuse)  # the same text in another row
    *_, grown, changed, moved = engine.requests
    assert [draft is None for draft in grown.drafts] == [False, False, True]
    assert changed.drafts is None
    assert moved.drafts is None


def test_a_share_of_a_group_brings_its_own_drafts(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, engine := Markov()).collect, Speculation(1000)
    first = collect(draws([0]), PARAMS, ("train", 0), reuse)
    second = collect(draws([0])[1:], PARAMS, ("train", 1), reuse)  # the first sibling is another process's now
    assert engine.requests[-1].drafts == tokens(first)[1:]
    assert tokens(second) == tokens(first)[1:]


def test_exact_reuse_needs_no_probabilities(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, engine := Markov()).collect, Speculation(1000)
    for visit in range(2):
        collect(draws([0]), PARAMS, ("train", visit), reuse)
    assert engine.requests[0].seeds == engine.requests[1].seeds
    assert (engine.requests[1].draft_logprobs, engine.requests[1].draft_lenience) == (None, None)


def test_lenient_reuse_sends_probabilities_and_draws_afresh(tiny_tokenizer):
    collect, reuse = collector(tiny_tokenizer, engine := Markov()).collect, Speculation(1000, lenience=1.5)
    first = collect(draws([0]), PARAMS, ("train", 0), reuse)
    collect(draws([0]), PARAMS, ("train", 1), reuse)
    request = engine.requests[1]
    assert request.drafts == tokens(first)
    assert request.draft_logprobs == [rollout.logprobs for rollout in first]
    assert request.draft_lenience == 1.5
    assert not set(request.seeds) & set(engine.requests[0].seeds)


def test_without_reuse_nothing_is_remembered(tiny_tokenizer):
    collect = collector(tiny_tokenizer, engine := Markov()).collect
    for visit in range(2):
        collect(draws([0]), PARAMS, ("train", visit))
    assert [request.drafts for request in engine.requests] == [None, None]
    assert engine.requests[0].seeds != engine.requests[1].seeds


def test_the_share_is_of_all_sampled_tokens():
    def rollout(length, reused):
        return Rollout([1], [5] * length, [True] * length, None, "", FinishReason.STOP, reused=reused)

    # (3 + 0) of (4 + 6) tokens
    assert reuse_stats([rollout(4, 3), rollout(6, 0)]) == {"sampling/reused_token_fraction": Mean(3.0, 10.0)}
