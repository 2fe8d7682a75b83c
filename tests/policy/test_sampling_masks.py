"""Scores under sampling masks and a repetition penalty equal those of the distribution that was sampled from."""

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.lm_head import linear
from covey.policy.lm_head.scores import Head, score_hidden
from covey.policy.lm_head.support import SampledSupport
from covey.policy.scoring import TokenScorer
from tests.policy.test_lm_head import Doubled
from tests.support import tiny

WORDS = 31


def masked_rollouts(words=WORDS, seed=0):
    """Two answers to one prompt and one to another; every third token was drawn from all, one was not sampled."""
    torch.manual_seed(seed)

    def rollout(prompt, length):
        ids = torch.randint(words, (length,)).tolist()
        masks = [sorted({token, *torch.randint(words, (4,)).tolist()}) if i % 3 else [] for i, token in enumerate(ids)]
        sampled = [i != 2 for i in range(length)]
        return Rollout(prompt, ids, sampled, None, "", FinishReason.STOP, sampling_mask=masks)

    return [rollout([1, 2], 6), rollout([1, 2], 9), rollout([5], 4)]


def sampled_from(logits, rollout, index, penalty, temperature):
    """Log-probs of the kept tokens of one position by id, from its row of logits: word by word, as CTRL's formula."""
    before = {*rollout.prompt_ids, *rollout.completion_ids[:index]}
    penalised = [(z / penalty if z > 0 else z * penalty) if v in before else z for v, z in enumerate(logits)]
    kept = rollout.sampling_mask[index] or range(len(logits))
    log_p = torch.stack([penalised[v] / temperature for v in kept]).log_softmax(0)
    return dict(zip(kept, log_p, strict=True))


def naive(rows, rollouts, penalty, temperature):
    """Log-probs and entropies of the learned tokens, from an iterator of their rows of logits."""
    logprobs, entropies = [], []
    for rollout in rollouts:
        for i, token in enumerate(rollout.completion_ids):
            if rollout.sampled[i]:
                log_p = sampled_from(next(rows), rollout, i, penalty, temperature)
                each = torch.stack(list(log_p.values()))
                logprobs.append(log_p[token])
                entropies.append(-(each.exp() * each).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def loss_of(logprobs, entropies):
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return (weights * (logprobs - logprobs.detach() + 0.1).exp()).sum() + 0.3 * entropies.square().sum()


@pytest.mark.parametrize("tile_bytes", [16 * 2**20, 320])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
@pytest.mark.parametrize("settings", [{"scale": 1.5}, {"soft_cap": 2.0, "bias": True}, {"frozen": True}], ids=str)
def test_scores_and_gradients_equal_the_naive_ones(monkeypatch, tile_bytes, penalty, kind, settings):
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", tile_bytes)
    settings = dict(settings)
    module = kind(6, WORDS, bias=settings.pop("bias", False)).double()
    module.requires_grad_(not settings.pop("frozen", False))
    rollouts = masked_rollouts()
    batch = collate(rollouts)
    learned = batch.sampled.nonzero()[:, 0]
    hidden = torch.randn(len(learned), 6, dtype=torch.float64, requires_grad=True)
    leaves = [leaf for leaf in (hidden, *module.parameters()) if leaf.requires_grad]
    head, support = Head(module, **settings), SampledSupport.of(batch, learned, penalty)
    expected = naive(iter(head(hidden)), rollouts, penalty, 0.7)
    for entropy in (False, True):
        scores = score_hidden(
            hidden, batch.token_ids[learned], head, temperature=0.7, entropy=entropy, chunk_size=4, support=support
        )
        pairs = [(scores.logprobs, expected[0])] + [(scores.entropies, expected[1])] * entropy
        ours, theirs = (loss_of(pairs[0][i], pairs[-1][i] if entropy else torch.zeros(1)) for i in (0, 1))
        pairs += zip(
            torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves, retain_graph=True), strict=True
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_every_layout_trains_what_was_sampled(layout):
    model = tiny.model().double()
    rollouts = masked_rollouts(model.config.vocab_size)
    scorer = TokenScorer(lambda m: m, temperature=0.8, layout=layout, repetition_penalty=1.2)
    batch = collate(rollouts)
    scores = scorer(model, batch, entropy=True)
    rows = (
        model(torch.tensor([rollout.prompt_ids + rollout.completion_ids])).logits[0, len(rollout.prompt_ids) - 1 + i]
        for rollout in rollouts
        for i, sampled in enumerate(rollout.sampled)
        if sampled
    )
    expected = naive(rows, rollouts, 1.2, 0.8)
    assert (scores.logprobs[~batch.sampled] == 0).all()
    ours = scores.logprobs[batch.sampled], scores.entropies[batch.sampled]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad(loss_of(*pair), list(model.parameters())) for pair in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)  # normalisation layers compute in float32


def test_a_token_that_sampling_left_no_choice_has_probability_1():
    # Kept: token 3 alone, then 3 and 4 of equal logits, then all 31.
    rollout = Rollout([0], [3, 3, 3], [True] * 3, None, "", FinishReason.STOP, sampling_mask=[[3], [3, 4], []])
    batch = collate([rollout])
    support = SampledSupport.of(batch, torch.arange(3), 1.0)
    module = torch.nn.Linear(6, WORDS, bias=False)
    module.weight.data.zero_()
    scores = score_hidden(
        torch.randn(3, 6), batch.token_ids, Head(module), temperature=1.0, entropy=True, chunk_size=8, support=support
    )
    expected = torch.tensor([1.0, 2.0, 31.0]).log()
    torch.testing.assert_close(scores.logprobs, -expected)
    torch.testing.assert_close(scores.entropies, expected)
