"""Terms of the loss: each is averaged over tokens of its own, and no cut of a batch changes it."""

from dataclasses import replace

import pytest
import torch

from covey.core.batch import TrainBatch, collate, join
from covey.core.losses import (
    mean_constant_length,
    mean_over_update,
    mean_per_micro_batch,
    mean_per_sequence,
    sum_per_sequence,
)
from covey.core.objective import Objective, policy_loss
from covey.core.records import FinishReason, Rollout
from covey.core.stats import Mean, read
from covey.core.terms import TermCounts, TokenTerm, term_sizes, term_weights, tokens_of_terms
from covey.trainer.distributed.exchange import RolloutIndex
from covey.trainer.microbatches import micro_batch_tokens
from tests.support.objective_cases import bare_batch

LENGTHS = torch.tensor([2, 2, 2, 18])
GAPS = torch.tensor([1.0] * 6 + [0.1] * 18, dtype=torch.float64)


def term(shares, values=GAPS, coef=1.0, name="extra"):
    """A term whose tokens and values are given by each token's place."""
    return TokenTerm(
        name, lambda batch: shares[batch.origin], lambda x: values[x.batch.origin] * (1 + x.logprobs), lambda step: coef
    )


def weighted(terms, weighting=mean_over_update, rows=2, lengths=LENGTHS):
    """A batch with the terms' tokens and the scales of one optimizer step."""
    tokens = int(lengths.sum())
    zeros = torch.zeros(tokens, dtype=torch.float64)
    batch = bare_batch(torch.ones(tokens, dtype=torch.bool), lengths, advantages=zeros, weights=zeros + 1)
    batch.origin = torch.arange(tokens)
    batch.prompt_ids, batch.prompt_lengths = torch.tensor([7]), torch.tensor([1])
    batch.term_tokens = tokens_of_terms(terms, batch)
    for name, sizes in term_sizes(batch).items():
        numbers = sizes.double()
        counts = TermCounts.of(sizes, rows)
        batch.term_scales[name] = counts.scales(weighting, numbers, micro_batch_tokens(numbers, rows), 20)
    return batch


def loss_of(batch, terms, logprobs=None, step=0):
    objective = Objective(lambda x: -x.ratio * x.advantages, terms=tuple(terms))
    logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64) if logprobs is None else logprobs
    return policy_loss(batch, logprobs, None, objective, 0.0, step)


EVERY, FIRST_TWO = torch.ones(24), (torch.arange(24) < 4).float()


@pytest.mark.parametrize(
    ("weighting", "shares", "expected"),
    [
        # gaps of 1, 1, 1 and .1 in rows of 2, 2, 2 and 18 tokens
        (mean_over_update, EVERY, (6 + 1.8) / 24),
        (mean_per_sequence, EVERY, 3.1 / 4),
        (mean_per_micro_batch, EVERY, (1 + (2 + 1.8) / 20) / 2),
        (mean_constant_length, EVERY, 7.8 / (4 * 20)),
        (sum_per_sequence, EVERY, 7.8 / 4),
        # the first two rows alone: those without are in neither sum nor count
        (mean_over_update, FIRST_TWO, 1.0),
        (mean_per_sequence, FIRST_TWO, 1.0),
        (mean_per_micro_batch, FIRST_TWO, 1.0),
        (sum_per_sequence, FIRST_TWO, 4 / 2),
        (mean_over_update, 0.05 * FIRST_TWO, 0.05),  # a factor of its own is in the sum alone
    ],
)
def test_a_term_is_averaged_over_its_own_tokens(weighting, shares, expected):
    terms = [term(shares)]
    result = loss_of(weighted(terms, weighting), terms)
    assert result.loss.item() == pytest.approx(expected)
    (stats,) = read([result.stats])
    assert stats["extra/loss"].value() == pytest.approx(GAPS[shares != 0].mean().item())


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_cutting_changes_no_term(parts):
    shares = (torch.arange(24) % 3 == 0).float() * 0.5
    terms, logprobs = [term(shares)], torch.randn(24, generator=torch.Generator().manual_seed(0)).double()
    batch, leaf = weighted(terms, mean_per_sequence), logprobs.requires_grad_()
    starts = [0, 2, 4, 6, 24]
    total = 0.0
    for rows in torch.arange(4).tensor_split(parts):
        tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
        total += loss_of(batch.select(rows), terms, leaf[tokens]).loss
    whole = loss_of(batch, terms, leaf).loss
    (cut,), (uncut,) = torch.autograd.grad(total, leaf), torch.autograd.grad(whole, leaf)
    assert torch.allclose(cut, uncut, atol=1e-15, rtol=0) and total.item() == pytest.approx(whole.item(), abs=1e-15)


def test_two_terms_have_two_denominators_and_weights_by_the_step():
    first = replace(term(FIRST_TWO), name="first", coef=lambda step: 0.5 * step)
    second = replace(term(1 - FIRST_TWO), name="second", coef=lambda step: 2.0)
    batch = weighted([first, second])
    second_alone = (2 + 1.8) / 20  # two tokens of 1 and eighteen of .1
    assert loss_of(batch, [first, second], step=0).loss.item() == pytest.approx(2 * second_alone)
    assert loss_of(batch, [first, second], step=3).loss.item() == pytest.approx(1.5 + 2 * second_alone)


def test_the_surrogate_may_weigh_less_beside_the_terms():
    batch = weighted([term(FIRST_TWO)])
    batch.advantages = torch.ones(24, dtype=torch.float64)
    zeros = torch.zeros(24, dtype=torch.float64)
    for coef, expected in ((None, -24.0), (lambda step: 0.25 * step, -12.0)):
        objective = Objective(lambda x: -x.ratio * x.advantages, surrogate_coef=coef)
        assert policy_loss(batch, zeros, None, objective, 0.0, 2).loss.item() == expected


def test_tokens_that_were_not_sampled_may_be_part_of_a_term():
    shares = (torch.arange(24) % 2).float()
    batch = weighted([term(shares)])
    batch.sampled = torch.arange(24) % 2 == 0
    batch.old_logprobs = torch.where(batch.sampled, 0.0, torch.nan).double()
    assert batch.scored.all()
    logprobs = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    ratio = TokenTerm("extra", lambda _: shares, lambda x: x.ratio, lambda step: 1.0)
    result = loss_of(batch, [ratio], logprobs)
    assert result.loss.item() == pytest.approx(1.0)  # the policy's own log-prob stands for the old one
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert gradient[1::2].tolist() == pytest.approx([1 / 12] * 12) and not gradient[::2].any()


def test_wild_numbers_of_other_tokens_spoil_nothing():
    values = torch.where(FIRST_TWO != 0, GAPS, torch.nan)
    terms = [TokenTerm("extra", lambda _: FIRST_TWO, lambda x: values * x.logprobs, lambda step: 1.0)]
    leaf = torch.full((24,), -1.0, dtype=torch.float64, requires_grad=True)
    result = loss_of(weighted(terms), terms, leaf)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert result.loss.item() == -1.0 and gradient.isfinite().all() and not gradient[4:].any()


def rollouts(count=3):
    return [Rollout([1], [5, 6], [True, False], None, "", FinishReason.STOP) for _ in range(count)]


def with_terms(batch, first=0.0):
    batch.term_tokens = {"a": torch.arange(batch.num_tokens) + first, "b": torch.zeros(batch.num_tokens)}
    batch.term_scales = {name: torch.arange(len(batch)) + first for name in "ab"}
    return batch


def test_terms_travel_with_their_batch():
    batch = with_terms(collate(rollouts()), 1.0)
    assert batch.scored.tolist() == [True] * 6
    chosen = TrainBatch.of_state(batch.select(torch.tensor([2, 0])).to("cpu").state())
    assert chosen.term_tokens["a"].tolist() == [5, 6, 1, 2] and chosen.term_scales["a"].tolist() == [3, 1]
    joined = join([chosen, batch.idle()])
    assert joined.term_tokens["a"].tolist() == [5, 6, 1, 2, 0] and joined.term_scales["b"].tolist() == [3, 1, 0]
    assert term_weights(chosen, "a").tolist() == [15, 18, 1, 2]
    assert torch.equal(joined.silenced().term_tokens["a"], joined.term_tokens["a"])


def test_rollouts_with_a_term_are_run_and_others_dropped():
    batch = collate(rollouts())
    batch.advantages = torch.zeros(6)
    batch.term_tokens = {"a": torch.tensor([0.0, 0, 0, 1, 0, 0])}  # of the second rollout, a token not sampled
    index = RolloutIndex.of(batch)
    assert index.has_signal.tolist() == [False, True, False]
    left = index.without_signal_dropped()
    assert left.rows.tolist() == [1] and left.term_tokens["a"].tolist() == [1]


def test_counts_of_a_term_add_up_over_processes():
    first, second = (TermCounts.of(torch.tensor(sizes), 2) for sizes in ([2, 0, 0, 0], [1, 1, 3, 0]))
    assert first == (2, 1, 1) and second == (5, 3, 2)
    assert TermCounts.sum([first, second]) == (7, 4, 3) and TermCounts.sum([first, second]).times(0.5) == (3.5, 2, 1.5)
    nothing = TermCounts.of(torch.zeros(2), 2)
    assert nothing.scales(mean_per_sequence, torch.zeros(2), torch.zeros(2), None).isfinite().all()


def test_metrics_of_a_term_are_means_over_its_tokens():
    extra = replace(term(FIRST_TWO), stats=lambda x: {"extra/size": Mean(x.tokens.sum(), 1.0)})
    (stats,) = read([loss_of(weighted([extra]), [extra]).stats])
    assert stats["extra/size"].value() == 4.0 and stats["extra/loss"].count == 4
