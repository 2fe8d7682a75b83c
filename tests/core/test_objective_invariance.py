"""However one optimizer step is ordered, cut or spread over ranks, its summed gradient is the same."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.algorithms.grpo import objective
from covey.core.losses import SurrogateInputs, k3
from covey.core.objective import Objective, policy_loss
from covey.core.stats import merge_all
from tests.support.brute_force import Options
from tests.support.objective_cases import (
    RowsByRank,
    assert_same,
    bare_batch,
    config,
    covey_gradients,
    flat_batch,
    random_rows,
)

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo", "rloo"]
RICH = Options(
    beta=0.3,
    bias_correction=True,
    off_policy_threshold=0.05,
    top_entropy_quantile=0.6,
    entropy_coef=0.2,
    mismatch_mode="sequence_truncate",
    clip_max=1.3,
)
ROWS_PER_UPDATE = 12


@pytest.mark.parametrize("loss_type", LOSSES)
@given(data=st.data())
def test_any_cut_into_micro_batches_sums_to_the_same_gradient(loss_type, data):
    order = data.draw(st.permutations(range(ROWS_PER_UPDATE)))
    cuts = sorted(data.draw(st.sets(st.integers(1, ROWS_PER_UPDATE - 1), max_size=6)))
    edges = [0, *cuts, ROWS_PER_UPDATE]
    parts = [order[a:b] for a, b in itertools.pairwise(edges)]
    rollout_batch, o = random_rows(3), replace(RICH, loss_type=loss_type)
    assert_same(covey_gradients(rollout_batch, o, parts=parts), covey_gradients(rollout_batch, o), 1e-9)


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "bnpo"])
@pytest.mark.parametrize(("world", "per_device"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_spreading_over_ranks_changes_nothing(loss_type, world, per_device):
    """The same 12 completions on 1, 2, 3 and 6 ranks; bnpo, whose mean is a micro-batch's, is left out."""
    rows = random_rows(3, world=1, per_device=6, updates=1).rows[0]
    spread = RowsByRank([rows[r * 12 // world : (r + 1) * 12 // world] for r in range(world)], per_device, 2)
    alone = RowsByRank([rows], 6, 2)
    o = replace(RICH, loss_type=loss_type, entropy_coef=0.0)
    assert_same(covey_gradients(spread, o), covey_gradients(alone, o), 1e-9)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_rank_of_a_micro_batch_does_not_matter(loss_type):
    """Two ranks with two micro-batches each, or one rank with four: the nominal micro-batches are the same."""
    two = random_rows(3, updates=1)
    one = RowsByRank([[row for rank in two.rows for row in rank]], two.per_device, 4)
    o = replace(RICH, loss_type=loss_type)
    assert_same(covey_gradients(one, o), covey_gradients(two, o), 1e-9)


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "bnpo"])
def test_the_order_in_which_rollouts_were_drawn_changes_nothing(loss_type):
    rollout_batch = random_rows(3, world=1, per_device=12, accumulation=1, updates=1)
    order = random.Random(0).sample(range(12), 12)
    shuffled = RowsByRank([[rollout_batch.rows[0][i] for i in order]], 12, 1)
    o = replace(RICH, loss_type=loss_type)
    straight, permuted = covey_gradients(rollout_batch, o), covey_gradients(shuffled, o)
    sizes = [len(row.mask) for row in rollout_batch.rows[0]]
    for name in ("logprobs", "entropies"):
        pieces = getattr(straight, name).split(sizes)
        torch.testing.assert_close(getattr(permuted, name), torch.cat([pieces[i] for i in order]))
    assert straight.loss == pytest.approx(permuted.loss)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_metrics_merge_to_the_same_values_whatever_the_cut(loss_type):
    o = replace(RICH, loss_type=loss_type)
    batch = flat_batch(random_rows(3), o)
    torch.manual_seed(0)
    logprobs, entropies = -torch.rand(batch.num_tokens).double() * 3, torch.rand(batch.num_tokens).double()

    def stats(rows):
        ids = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        tokens = torch.cat([torch.nonzero(ids == row).flatten() for row in rows])
        chosen = batch.select(torch.tensor(rows))
        return policy_loss(chosen, logprobs[tokens], entropies[tokens], objective(config(o)), 0.2).stats

    whole, parts = stats(list(range(len(batch)))), {}
    for start in range(0, len(batch), 5):
        merge_all(parts, stats(list(range(start, min(start + 5, len(batch))))))
    means = {name for name, stat in whole.items() if stat.reduction == "mean"}
    assert {"kl", "entropy"} <= means
    for name in means:
        assert parts[name].value() == pytest.approx(whole[name].value()), name


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_what_was_not_sampled_cannot_spoil_the_gradient(loss_type, level):
    """Log-probs of tool tokens as wild as floats get: same gradient, and exactly 0 for those tokens."""
    o = replace(RICH, loss_type=loss_type, level=level, mismatch_mode=None, top_entropy_quantile=1.0)
    batch = flat_batch(random_rows(3), o)
    calm = torch.full((batch.num_tokens,), -1.0, dtype=torch.float64)
    wild = torch.where(batch.sampled, calm, float("inf"))

    def gradient(values):
        leaf = values.clone().requires_grad_()
        policy_loss(batch, leaf, torch.ones_like(leaf), objective(config(o)), 0.2).loss.backward()
        return leaf.grad

    assert torch.equal(gradient(wild), gradient(calm))
    assert not gradient(wild)[~batch.sampled].any()


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "cispo", "vespo", "gmpo", "rloo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
def test_a_ratio_beyond_float32_leaves_the_gradient_finite(loss_type, advantage, log_ratio):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    one = torch.ones(1)
    batch = bare_batch(one.bool(), one.long(), advantages=one * advantage, weights=one, old_logprobs=torch.zeros(1))
    result = policy_loss(batch, logprobs, None, objective(config(Options(loss_type))))
    result.loss.backward()
    assert result.loss.isfinite()
    assert logprobs.grad.isfinite()


def test_a_step_without_trained_tokens_has_no_gradient():
    """One empty completion and one truncated one."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = bare_batch(
        sampled=torch.zeros(2, dtype=torch.bool),
        lengths=torch.tensor([0, 2]),
        advantages=torch.ones(2),
        weights=torch.zeros(2),
    )
    for loss_type in LOSSES:
        result = policy_loss(
            batch, logprobs, torch.ones(2), objective(config(Options(loss_type, off_policy_threshold=0.1)))
        )
        result.loss.backward()
        assert result.loss == 0
        assert not logprobs.grad.any()


def test_a_batch_of_nothing_is_legal():
    """Spare micro-steps keep ranks in step: no rollouts, a loss of 0 that can still be differentiated."""
    logprobs = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    batch = bare_batch(none.bool(), none.long(), advantages=none, weights=none)
    for loss_type in LOSSES:
        result = policy_loss(batch, logprobs, none, objective(config(Options(loss_type, off_policy_threshold=0.1))))
        result.loss.backward()
        assert result.loss == 0


def test_by_eye_two_tokens_reinforced_and_kept_close():
    """On-policy, A = 2, weights 1/2, β = 0.5 and k3.

    policy: Σ ½ · -2 = -2, gradient -1 each. kl: lp - ref = [ln 2, 0] -> k3 = ½ + ln 2 - 1 and 0;
    d k3 / d lp = 1 - ref/p = [½, 0], times ½ · 0.5 = [0.125, 0].
    """
    logprobs = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ln2 = torch.tensor(2.0, dtype=torch.float64).log()
    batch = bare_batch(
        sampled=torch.ones(2, dtype=torch.bool),
        lengths=torch.tensor([2]),
        advantages=torch.full((2,), 2.0),
        weights=torch.full((2,), 0.5),
        ref_logprobs=torch.stack([-ln2, ln2 * 0 - 1.0]),
    )
    result = policy_loss(batch, logprobs, None, Objective(surrogate=lambda x: -x.ratio * x.advantages, beta=0.5, kl=k3))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-2 + 0.25 * (ln2.item() - 0.5))
    assert logprobs.grad.tolist() == pytest.approx([-1 + 0.125, -1.0])
    assert result.stats["kl"].value() == pytest.approx((ln2.item() - 0.5) / 2)


def test_the_kl_term_is_neither_filtered_nor_corrected():
    """A punished, drifted row whose surrogate is dropped and whose ρ is 0 still feels the reference."""
    logprobs = torch.tensor([-3.0], requires_grad=True)
    one = torch.ones(1)
    batch = bare_batch(
        sampled=one.bool(),
        lengths=one.long(),
        advantages=-one,
        weights=one,
        old_logprobs=-one,
        ref_logprobs=-one,
        mismatch_weights=0 * one,
        entropy_threshold=2.0,
    )

    def surrogate(x: SurrogateInputs):
        return -x.ratio * x.advantages

    kl = Objective(surrogate, beta=1.0, kl=lambda p, q: p - q, off_policy_threshold=0.5)
    result = policy_loss(batch, logprobs, one, kl)
    assert result.loss.item() == pytest.approx(-3.0 + 1.0)
    assert result.stats["kept_token_fraction"].value() == 0.0


def test_a_token_at_the_entropy_threshold_is_kept():
    one = torch.ones(3)
    batch = bare_batch(one.bool(), torch.tensor([3]), advantages=one, weights=one, entropy_threshold=1.0)
    result = policy_loss(
        batch, -one, torch.tensor([0.5, 1.0, 1.5]), Objective(surrogate=lambda x: -x.ratio * x.advantages)
    )
    assert result.loss.item() == -2
    assert result.stats["kept_token_fraction"].value() == pytest.approx(2 / 3)


@pytest.mark.parametrize("level", ["token", "sequence_sum"])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    ("now", "old", "ref"),
    [(-1.0, -100.0, -1.0), (-100.0, -1.0, -100.0), (-120.0, -120.0, -1.0), (-1.0, -200.0, -150.0)],
)
def test_policies_far_apart_give_finite_numbers(loss_type, kl_estimator, level, now, old, ref):
    """e^99 is infinite in float32, and 0 times infinity is NaN: in the ratio, the KL correction and the estimators."""
    o = Options(loss_type, level=level, beta=0.1, kl_estimator=kl_estimator, bias_correction=True)
    one, leaf = torch.ones(4), torch.full((4,), now, requires_grad=True)
    batch = bare_batch(
        one.bool(),
        torch.tensor([1, 3]),
        advantages=torch.tensor([1.0, -1.0, -1.0, -1.0]),
        weights=one / 4,
        old_logprobs=one * old,
        ref_logprobs=one * ref,
    )
    result = policy_loss(batch, leaf, None, objective(config(o)))
    result.loss.backward()
    assert result.loss.isfinite() and leaf.grad.isfinite().all()
    assert all(math.isfinite(stat.value()) for stat in result.stats.values())
