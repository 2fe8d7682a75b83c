"""Scoring with given routes: in every layout, with shared prompts and branches, read back, and differentiated."""

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.core.routes import differing
from covey.core.routing import routing_of
from covey.policy.layouts import LAYOUTS
from covey.policy.scoring import TokenScorer
from tests.support import mixtures
from tests.support.exact import KeepFloat64


@pytest.fixture(autouse=True)
def _keep_float64():
    with KeepFloat64():
        yield


def rollouts(model, of_prompt=1):
    """Two groups whose completions begin alike, with experts at random; `of_prompt` routes of a group's prompt."""
    chance, shape = torch.Generator().manual_seed(0), routing_of(model).shape

    def path(tokens):
        odds = torch.rand(tokens, len(shape.layers), shape.experts, generator=chance)
        return odds.argsort(-1)[..., : shape.top_k].to(shape.dtype)

    def ids(count):
        return torch.randint(4, 100, (count,), generator=chance).tolist()

    found = []
    for group, lengths in enumerate([(12, 14, 3), (11, 11)]):
        prompt, begin = ids(5 - group), ids(10)
        prompts, begun = [path(len(prompt)) for _ in range(of_prompt)], path(10)
        for number, length in enumerate(lengths):
            tokens = begin[:length] + ids(max(0, length - 10))
            routes = torch.cat([prompts[number % of_prompt], begun[:length], path(max(0, length - 10))])[:-1]
            found.append(Rollout(prompt, tokens, [True] * length, None, "", FinishReason.STOP, group, routes=routes))
    return found


def scorer(layout):
    return TokenScorer(lambda model: model, temperature=1.0, layout=layout)


def scored(model, batch, layout):
    model.zero_grad()
    scores = scorer(layout)(model, batch)
    scores.logprobs.sum().backward()
    return scores, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("of_prompt", [1, 2], ids=["one route of a prompt", "several"])
@pytest.mark.parametrize("name", mixtures.SETTINGS)
def test_layouts_agree_on_given_routes(name, of_prompt):
    model = mixtures.model(name).double()
    batch = collate(rollouts(model, of_prompt))
    alone = [scored(model, collate([one]), "padded") for one in rollouts(model, of_prompt)]
    expected = torch.cat([scores.logprobs for scores, _ in alone])
    gradients = [sum(parts) for parts in zip(*(grads for _, grads in alone), strict=True)]
    assert (scorer("padded")(model, batch.unrouted()).logprobs - expected).abs().max() > 0.01, "routes matter"
    for layout in LAYOUTS:
        scores, found = scored(model, batch, layout)
        torch.testing.assert_close(scores.logprobs, expected.float(), atol=1e-6, rtol=1e-6, check_dtype=False)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_are_read_at_their_tokens(layout):
    model = mixtures.model("DeepseekV3").double()
    batch = collate(rollouts(model))
    with torch.no_grad():
        _, tokens, prompts = scorer(layout).routes(model, batch)
    assert not differing(batch.routes, tokens).any()
    assert not differing(batch.prompt_routes, torch.cat(prompts)).any()
    ends = batch.lengths.cumsum(0) - 1
    assert (tokens[ends] < 8).all(), "the last token is computed as well, and nobody reads it"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaying_what_was_read_changes_nothing(layout):
    model = mixtures.model("Qwen3Moe").double()
    plain = collate(rollouts(model)).unrouted()
    with torch.no_grad():
        free, tokens, prompts = scorer(layout).routes(model, plain)
        plain.routes, plain.prompt_routes = tokens, torch.cat(prompts)
        again = scorer(layout)(model, plain)
    torch.testing.assert_close(again.logprobs, free.logprobs, atol=1e-9, rtol=1e-9)
    assert (again.routes.replaced.sum(), again.routes.forced > 0) == (0, True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strands_are_routed_as_their_tokens(layout):
    # The prompt and 3 tokens; then 4 after the prompt's first two, and 5 after nothing.
    model, sampled = mixtures.model("Mixtral").double(), [place != 7 for place in range(12)]
    shape = routing_of(model).shape
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 100, (17,), generator=chance).tolist()
    rows = [torch.randperm(4, generator=chance)[:2] for _ in range(17 * len(shape.layers))]
    routes = torch.stack(rows).view(17, len(shape.layers), 2).to(torch.uint8)
    whole = Rollout(ids[:5], ids[5:], sampled, None, "", FinishReason.STOP, strands=[(3, 1), (7, -1)], routes=routes)
    parts = [
        Rollout(ids[:5], ids[5:8], [True] * 3, None, "", FinishReason.STOP, routes=routes[:8]),
        Rollout(
            ids[:2], ids[8:12], [True] * 4, None, "", FinishReason.STOP, routes=torch.cat([routes[:2], routes[8:12]])
        ),
        Rollout(ids[12:13], ids[13:], [True] * 4, None, "", FinishReason.STOP, routes=routes[12:]),
    ]
    with torch.no_grad():
        found = scorer(layout)(model, collate([whole])).logprobs
        expected = [scorer("padded")(model, collate([part])).logprobs for part in parts]
        _, read, prompts = scorer(layout).routes(model, collate([whole]))
    together = torch.cat([expected[0], expected[1], found[7:8], expected[2]])
    torch.testing.assert_close(found, together, atol=1e-6, rtol=1e-6)
    assert not differing(read, routes[5:]).any()
    assert not differing(prompts[0], routes[:5]).any()
