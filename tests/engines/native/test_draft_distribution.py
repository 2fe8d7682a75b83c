"""Drafts and the distribution: whatever a draft says, tokens follow the policy that checks it."""

import asyncio

import pytest
import torch

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.engine import NativeEngine
from tests.support import tiny

PROMPT = [5, 6, 7]
ROWS = 4000
PARAMS = SamplingParams(max_tokens=2)


def policy(change=0.0):
    """A model over 600 tokens; `change` moves its weights by that share of their size."""
    model = tiny.model(vocab_size=600, scale=4.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(change * parameter.std().nan_to_num() * torch.randn_like(parameter))
    return model


def sample(model, seeds, drafts=None):
    engine = NativeEngine(lambda: model, eos_token_ids=set(), pad_token_id=0, max_sequences=1000)
    with engine.awake():
        return asyncio.run(engine.generate(SampleRequest(PROMPT, len(seeds), PARAMS, list(seeds), drafts=drafts)))


def tokens(completions):
    return [completion.token_ids for completion in completions]


@torch.no_grad()
def token_probabilities(model):
    """[2, V] of every first token and, whatever the first, of every second one."""
    first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
    followed = torch.tensor([[*PROMPT, token] for token in range(len(first))])
    second = model(followed).logits[:, -1].double().softmax(-1)
    return torch.stack([first, first @ second])


def surprise(completions, probabilities):
    """How many standard deviations Pearson's statistic is above its mean; cells expecting under 5 are one cell."""
    counts = torch.stack([torch.bincount(column, minlength=600) for column in torch.tensor(completions).T])
    expected = probabilities * len(completions)
    common = expected >= 5
    seen = torch.cat([counts[common], (counts * ~common).sum(-1)])
    due = torch.cat([expected[common], (expected * ~common).sum(-1)])
    freedom = len(due) - 2  # each of the two positions adds up to all rows
    assert freedom > 100, "enough cells to tell"
    return (((seen - due) ** 2 / due).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def now():
    return policy(0.3)


@pytest.fixture(scope="module")
def drafts():
    """By another policy with the same seeds, as reuse has them; with other seeds; and by no policy at all."""
    then = policy()
    return {
        "an earlier policy's": tokens(sample(then, range(ROWS))),
        "a stranger's": tokens(sample(then, range(ROWS, 2 * ROWS))),
        "one and the same": [[11, 12]] * ROWS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an earlier policy's", "a stranger's", "one and the same"])
def test_tokens_follow_the_verifying_policy(now, drafts, kind):
    completions = sample(now, range(ROWS), drafts[kind])
    assert tokens(completions) == tokens(sample(now, range(ROWS)))
    assert surprise(tokens(completions), token_probabilities(now)) < 4
    reused = sum(completion.reused for completion in completions) / (2 * ROWS)
    assert (0.2 if kind == "an earlier policy's" else 0.0) <= reused < 1


@pytest.mark.slow
def test_statistic_distinguishes_the_two_policies(now, drafts):
    assert surprise(drafts["an earlier policy's"], token_probabilities(now)) > 10
