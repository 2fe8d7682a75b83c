"""Sampling: the distribution drawn from is the one that was meant."""

import pytest
import torch

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.sampling import (
    BLOCK,
    Batch,
    SequenceState,
    block_sums,
    exponential_race,
    filter_logits,
    sample_tokens,
    score_tokens,
)


def rows(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and steps."""
    return torch.arange(first, first + count), torch.zeros(count, dtype=torch.int64)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    kept = expected > 0
    return ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["seed", "step"])
def test_frequencies_match_the_probabilities(by):
    probs = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02, 0.0])
    n = 20_000
    varied, fixed = torch.arange(n), torch.full((n,), 7)
    weights = probs.expand(n, -1)
    tokens = exponential_race(weights, block_sums(weights), *((varied, fixed) if by == "seed" else (fixed, varied)))
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[5] == 0
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand runs; the seeds are fixed, so this either holds or not.
    assert chi_square(counts, probs.double()) < 18.5


@pytest.mark.parametrize("vocabulary", [2 * BLOCK, 2 * BLOCK + 3, BLOCK - 1])
def test_frequencies_match_across_blocks(vocabulary):
    weights = torch.rand(vocabulary, generator=torch.Generator().manual_seed(0)) ** 4
    weights[vocabulary // 2 :] *= 5  # blocks of unequal weight
    weights[-1] = weights.sum()  # and half of everything on the last token
    n = 30_000
    tokens = exponential_race(weights.expand(n, -1), block_sums(weights.expand(n, -1)), *rows(n))
    expected = weights.double() / weights.double().sum() * n
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    freedom = int(common.sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5 + 3


def test_zero_weight_token_is_never_sampled():
    weights = torch.zeros(500, 3 * BLOCK + 1)
    weights[:, 700] = 1e-30
    assert set(exponential_race(weights, block_sums(weights), *rows(500)).tolist()) == {700}


def test_small_change_of_probabilities_changes_few_samples():
    logits = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    moved = logits + 0.02 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=1)
    same = sample_tokens(logits, *rows(2000), params).tokens == sample_tokens(moved, *rows(2000), params).tokens
    # Total variation of the two is about 0.01 a row; exponential races agree but for at most twice as much.
    assert same.double().mean() > 0.97


def test_chunked_sampling_changes_no_sample(monkeypatch):
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=1)
    together = sample_tokens(logits, *rows(7), params)
    monkeypatch.setattr("covey.engines.native.sampling.CPU_CHUNK", 600)  # two rows
    for a, b in zip(together, sample_tokens(logits, *rows(7), params), strict=True):
        torch.testing.assert_close(a, b)


def test_scores_of_given_tokens_equal_those_of_sampled_ones():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -torch.inf
    drawn = sample_tokens(logits, *rows(6), SamplingParams(max_tokens=1, temperature=0.7))
    for a, b in zip(drawn, score_tokens(logits, drawn.tokens, 0.7), strict=True):
        torch.testing.assert_close(a, b)
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(drawn.logprobs, expected.gather(-1, drawn.tokens[:, None])[:, 0])
    torch.testing.assert_close(drawn.entropies, torch.special.entr(expected.exp()).sum(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(max_tokens=1, temperature=temperature)
    n = 8000
    drawn = sample_tokens(logits.expand(n, -1), *rows(n), params)
    counts = torch.bincount(drawn.tokens, minlength=4).double()
    probs = (logits[0].double() / temperature).softmax(-1)
    assert chi_square(counts, probs) < 16.3  # 3 degrees of freedom, one in a thousand
    torch.testing.assert_close(drawn.logprobs.double(), probs.log()[drawn.tokens], rtol=1e-5, atol=1e-5)


def test_samples_do_not_depend_on_other_rows():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=1)
    together = sample_tokens(logits, *rows(5), params).tokens
    alone = [sample_tokens(logits[i : i + 1], *rows(1, i), params).tokens.item() for i in range(5)]
    assert together.tolist() == alone


def test_zero_temperature_is_greedy():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert sample_tokens(logits, *rows(1), SamplingParams(max_tokens=1, temperature=0.0)).tokens.tolist() == [1]


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
def test_filters_keep_the_expected_tokens(settings, kept):
    left = filter_logits(LOGITS, SamplingParams(max_tokens=1, **settings))
    assert (left[0] > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_masks_are_the_tokens_that_each_row_keeps():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    masks = []
    params = SamplingParams(max_tokens=1, top_k=2, top_p=0.9, keep_mask=True)
    sampled = sample_tokens(logits, *rows(3), params, None, masks)
    # 3 and 2 have 0.73 and 0.27 of their two; 5 has 0.98 of all four; four alike are tied for second place.
    assert masks == [[1, 3], [0], []]
    chances = [{1: 0.7311, 3: 0.2689}, {0: 1.0}, dict.fromkeys(range(4), 0.25)]
    expected = torch.tensor([chance[token] for chance, token in zip(chances, sampled.tokens.tolist(), strict=True)])
    torch.testing.assert_close(sampled.logprobs.exp(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(sampled.entropies, torch.tensor([0.5822, 0.0, 1.3863]), rtol=0, atol=1e-4)


def test_keeping_masks_changes_no_sample():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    adjusted = logits - 0.5 * (torch.rand(50, 300) < 0.1)
    filters = {"max_tokens": 1, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    tokens = [
        sample_tokens(logits, *rows(50), SamplingParams(**filters, keep_mask=keep), adjusted).tokens
        for keep in (False, True)
    ]
    assert torch.equal(*tokens)


def test_repetition_penalty_by_eye():
    """Token 0 is in the prompt and 1 in the completion."""
    params = SamplingParams(max_tokens=1, repetition_penalty=2.0)
    sequence = SequenceState(SampleRequest([0], 1, params, [0]), 0, 1, set(), done=None, token_ids=[1])
    out = Batch([sequence], torch.device("cpu"))._adjusted(torch.tensor([[2.0, -2.0, 2.0]]), [0])
    assert out.tolist() == [[1.0, -4.0, 2.0]]


def test_reported_logprobs_ignore_the_filters():
    drawn = sample_tokens(LOGITS, *rows(1), SamplingParams(max_tokens=1, top_k=1))
    assert drawn.logprobs.exp().item() == pytest.approx(0.4)


def test_reported_entropies_are_those_of_the_whole_distribution():
    drawn = sample_tokens(LOGITS, *rows(1), SamplingParams(max_tokens=1, top_k=1))
    probs = LOGITS[0].exp()
    assert drawn.entropies.item() == pytest.approx(-(probs * probs.log()).sum().item(), rel=1e-5)
