"""Sampling: the distribution drawn from is the one that was meant."""

import pytest
import torch

from covey.rollout.engine import SamplingParams
from covey.rollout.sampling import draw, exponential_race, filter_logits


def generators(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    kept = expected > 0
    return ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()


def test_frequencies_match_the_probabilities():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02, 0.0])
    stream = torch.Generator().manual_seed(1)
    n = 20_000
    tokens = torch.stack([exponential_race(probs[None], [stream])[0] for _ in range(n)])
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[5] == 0
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand runs; the seed is fixed, so this either holds or not.
    assert chi_square(counts, probs.double()) < 18.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(max_tokens=1, temperature=temperature)
    n = 8000
    drawn = draw(logits.expand(n, -1), generators(n), params)
    counts = torch.bincount(drawn.tokens, minlength=4).double()
    probs = (logits[0].double() / temperature).softmax(-1)
    assert chi_square(counts, probs) < 16.3  # 3 degrees of freedom, one in a thousand
    torch.testing.assert_close(drawn.logprobs.double(), probs.log()[drawn.tokens], rtol=1e-5, atol=1e-5)


def test_a_row_is_drawn_alike_alone_and_in_company():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=1)
    together = draw(logits, generators(5), params).tokens
    alone = [draw(logits[i : i + 1], [torch.Generator().manual_seed(i)], params).tokens.item() for i in range(5)]
    assert together.tolist() == alone


def test_zero_temperature_is_greedy():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert draw(logits, generators(1), SamplingParams(max_tokens=1, temperature=0.0)).tokens.tolist() == [1]


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.7}, [0, 1]),  # 0.4 + 0.3 reaches 0.7
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),  # the most probable token always stays
        ({"min_p": 0.49}, [0, 1, 2]),  # at least 0.196
        ({"top_k": 3, "top_p": 0.8}, [0, 1, 2]),  # of [0.44, 0.33, 0.22]: 0.77 is short of 0.8
    ],
)
def test_filters_keep_the_tokens_they_should(settings, kept):
    left = filter_logits(LOGITS, SamplingParams(max_tokens=1, **settings))
    assert (left[0] > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, -2.0, 2.0]])
    seen = torch.tensor([[True, True, False]])
    out = filter_logits(logits, SamplingParams(max_tokens=1, repetition_penalty=2.0), seen)
    assert out.tolist() == [[1.0, -4.0, 2.0]]


def test_reported_logprobs_ignore_the_filters():
    drawn = draw(LOGITS, generators(1), SamplingParams(max_tokens=1, top_k=1))
    assert drawn.logprobs.exp().item() == pytest.approx(0.4)


def test_reported_entropies_are_those_of_the_whole_distribution():
    drawn = draw(LOGITS, generators(1), SamplingParams(max_tokens=1, top_k=1))
    probs = LOGITS[0].exp()
    assert drawn.entropies.item() == pytest.approx(-(probs * probs.log()).sum().item(), rel=1e-5)
