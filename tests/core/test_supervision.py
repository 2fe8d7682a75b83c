"""Supervised terms: who wrote a token decides whether it is to be predicted, and each term has its own count."""

import pytest
import torch

from covey.core.batch import collate, join
from covey.core.losses import mean_over_update
from covey.core.objective import Objective, policy_loss
from covey.core.records import FinishReason, Rollout
from covey.core.supervision import cross_entropy, tokens_of_writers
from covey.core.terms import TermCounts, TokenTerm, term_sizes, tokens_of_terms

USER, TOOL = 1, 2


def rollout(observed, finish=FinishReason.STOP, sampled=None):
    size = len(observed)
    flags = [not who for who in observed] if sampled is None else sampled
    return Rollout([9], list(range(size)), flags, None, "", finish, observed=observed)


ROLLOUTS = [
    rollout([0, TOOL, TOOL, 0]),
    rollout([0, USER, 0, TOOL], sampled=[False, False, True, False]),  # its first turn is not trained
    rollout([0, TOOL], FinishReason.LENGTH),
]
ECHO = TokenTerm("supervised", tokens_of_writers({"tool": 0.05, "user": 0.1}), cross_entropy, lambda step: 1.0)


def scaled(batch):
    """The batch with advantages of 1, sums of sampled tokens, and the term's token mean."""
    sampled = batch.sampled.double()
    batch.advantages, batch.weights = sampled, sampled
    batch.term_tokens = tokens_of_terms([ECHO], batch)
    sizes = term_sizes(batch)["supervised"].double()
    counts = TermCounts.of(sizes, 2)
    batch.term_scales = {"supervised": counts.scales(mean_over_update, sizes, sizes, None)}
    return batch


def test_the_writer_of_a_token_gives_its_weight():
    assert tokens_of_writers({"tool": 0.05})(collate(ROLLOUTS)).tolist() == pytest.approx(
        [0, 0.05, 0.05, 0, 0, 0, 0, 0.05, 0, 0.05]
    )
    assert not tokens_of_writers({"tool": 1.0})(collate([Rollout([9], [1], [True], None, "", FinishReason.STOP)])).any()


def test_masked_truncated_completions_have_no_supervised_token():
    batch = collate(ROLLOUTS, mask_truncated=True)
    assert batch.observed.tolist() == [0, 2, 2, 0, 0, 1, 0, 2, 0, 0]


def test_batches_with_and_without_other_writers_join():
    plain = collate([Rollout([9], [1], [True], None, "", FinishReason.STOP)])
    assert plain.observed is None
    assert join([plain, collate(ROLLOUTS[:1])]).observed.tolist() == [0, 0, 2, 2, 0]


def test_the_gradient_is_the_weighted_cross_entropy_over_its_own_count():
    batch = scaled(collate(ROLLOUTS, mask_truncated=True))
    logprobs = torch.linspace(-2, -0.2, 10, dtype=torch.float64).requires_grad_()
    objective = Objective(lambda x: -x.ratio * x.advantages, terms=(ECHO,))
    result = policy_loss(batch, torch.where(batch.scored, logprobs, 0.0), None, objective)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    # Four tokens: three of tools and one of a user. The sampled ones 0, 3 and 6 have the surrogate's -1.
    echo = [0, -0.05 / 4, -0.05 / 4, 0, 0, -0.1 / 4, 0, -0.05 / 4, 0, 0]
    expected = torch.tensor(echo, dtype=torch.float64)
    expected[[0, 3, 6]] = -1.0
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)
    mean = result.stats["supervised/loss"]
    assert (mean.total / mean.count).item() == pytest.approx(-logprobs[[1, 2, 5, 7]].mean().item())


def test_no_cut_changes_the_term():
    batch = scaled(collate(ROLLOUTS))
    logprobs = torch.linspace(-2, -0.2, 10, dtype=torch.float64).requires_grad_()
    objective = Objective(lambda x: -x.ratio * x.advantages, terms=(ECHO,))
    whole = policy_loss(batch, logprobs, None, objective).loss
    parts = [
        policy_loss(batch.select(torch.tensor([row])), part, None, objective).loss
        for row, part in enumerate(logprobs.split(batch.lengths.tolist()))
    ]
    expected, found = (torch.autograd.grad(loss, logprobs)[0] for loss in (whole, torch.stack(parts).sum()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
