"""Teachers in the loss, against exact gradients: a policy over V tokens and T steps, all of whose paths are rollouts.

Each path weighs its probability, so that sums over rollouts are expectations; everything is float64.
"""

import itertools
import math
from functools import partial

import pytest
import torch

from covey.algorithms import grpo
from covey.algorithms.terms import terms
from covey.core.batch import TrainBatch
from covey.core.distillation import (
    TeacherAdvantage,
    added_gap,
    binned_divergence,
    divergence_parts,
    divergence_slopes,
    gap_stats,
    log_mixture,
    sampled_divergence,
    split_names,
    tokens_with_a_teacher,
    whole_divergence,
)
from covey.core.losses import clip, mean_over_update
from covey.core.objective import Objective, policy_loss
from covey.core.stats import read
from covey.core.terms import TermCounts, TokenTerm, constant, peak_and_valley, term_sizes, tokens_of_terms
from covey.trainer.distributed.exchange import RolloutIndex
from tests.support import runs

V, T = 4, 3
PREFIXES = [prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)]
PLACE = {prefix: number for number, prefix in enumerate(PREFIXES)}
PATHS = list(itertools.product(range(V), repeat=T))
AT = torch.tensor([[PLACE[path[:step]] for step in range(T)] for path in PATHS])
TOKENS = torch.tensor(PATHS)


def table(seed, scale=1.0, start=0.0):
    """Log-probs [prefixes, V]."""
    draw = torch.randn(len(PREFIXES), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (start + scale * draw).log_softmax(-1)


POLICY, TEACHER = table(0), table(1)
OLD = table(2, 0.3, POLICY)
UNCLIPPED = partial(clip, epsilon_low=1e9, epsilon_high=1e9, delta=None)


def of_paths(log_table):
    """[paths * T] log-probs of the tokens of all paths."""
    return log_table[AT, TOKENS].flatten()


def chance(log_table):
    """[paths] probability of each path."""
    return log_table[AT, TOKENS].sum(1).exp()


def occupancy(log_table):
    """[prefixes] probability that each prefix is visited."""
    visited = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for step in range(T):
        visited.index_add_(0, AT[:, step], chance(log_table))
    return visited


def batch(behaviour, advantages=None, teacher=TEACHER, old=None):
    """All paths as rollouts of `behaviour`, each weighing its probability."""
    paths = len(PATHS)
    flat = torch.zeros(paths * T, dtype=torch.float64) if advantages is None else advantages.repeat_interleave(T)
    made = TrainBatch(
        token_ids=TOKENS.flatten(),
        lengths=torch.full((paths,), T),
        sampled=torch.ones(paths * T, dtype=torch.bool),
        prompt_ids=torch.tensor([0]),
        prompt_lengths=torch.tensor([1]),
        groups=torch.zeros(paths, dtype=torch.long),
        advantages=flat,
        weights=chance(behaviour).repeat_interleave(T),
        old_logprobs=None if old is None else of_paths(old),
        teacher_logprobs=None if teacher is None else of_paths(teacher),
    )
    made.term_tokens = {"teacher": tokens_with_a_teacher(made).double() * chance(behaviour).repeat_interleave(T)}
    made.term_scales = {"teacher": torch.ones(paths, dtype=torch.float64)}
    return made


def gradient(loss):
    """Gradient of a function of the policy's table, at the policy."""
    logits = POLICY.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logits.log_softmax(-1)), logits)
    return found


def reverse_kl(visited):
    """Gradient of Σ_s visited(s) KL(P(s) || T(s)) with the visits held fixed."""
    return gradient(lambda own: (visited * (own.exp() * (own - TEACHER)).sum(-1)).sum())


def added(coef=1.0, clip=None, advantage=added_gap):
    return Objective(UNCLIPPED, teacher=TeacherAdvantage(advantage, constant(coef), clip))


def own_term(coef=1.0, clip=None):
    value, stats = partial(sampled_divergence, clip=clip), partial(gap_stats, clip=clip)
    return Objective(UNCLIPPED, terms=(TokenTerm("teacher", tokens_with_a_teacher, value, constant(coef), stats),))


def loss_gradient(objective, given, step=0):
    return gradient(lambda own: policy_loss(given, of_paths(own), None, objective, 0.0, step).loss)


def close(found, expected):
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("objective", [added(), own_term()], ids=["advantage", "term"])
def test_without_rewards_the_gradient_is_that_of_the_reverse_kl_at_visited_prefixes(objective):
    close(loss_gradient(objective, batch(POLICY)), reverse_kl(occupancy(POLICY)))


@pytest.mark.parametrize("objective", [added(), own_term()], ids=["advantage", "term"])
def test_later_updates_follow_the_policy_as_it_is(objective):
    """With samples of an old policy the gradient is the reverse KL's at that policy's prefixes."""
    found = loss_gradient(objective, batch(OLD, old=OLD))
    close(found, reverse_kl(occupancy(OLD)))
    gap = of_paths(TEACHER) - of_paths(OLD)  # of the old log-probs, as others take it: another gradient
    stale = batch(OLD, teacher=None, old=OLD)
    stale.advantages = gap
    other = loss_gradient(Objective(UNCLIPPED), stale)
    assert (other - found).abs().max() > 0.05 * found.abs().max()


@pytest.mark.parametrize("objective", [added(0.7), own_term(0.7)], ids=["advantage", "term"])
def test_next_to_rewards_both_gradients_add_up(objective):
    rewards = torch.randn(len(PATHS), generator=torch.Generator().manual_seed(3)).double()
    advantages = rewards - (chance(POLICY) * rewards).sum()
    expected = gradient(lambda own: -(chance(own) * rewards).sum()) + 0.7 * reverse_kl(occupancy(POLICY))
    close(loss_gradient(objective, batch(POLICY, advantages)), expected)


def test_the_engines_difference_weighs_a_term_as_it_does_the_surrogate():
    """Samples of an engine that differs from the policy, corrected by their ratio: the policy's own expectation."""
    given = batch(OLD)
    given.mismatch_weights = (of_paths(POLICY) - of_paths(OLD)).exp()  # of tokens; prefixes stay the engine's
    for objective in (added(), own_term()):
        close(loss_gradient(objective, given), reverse_kl(occupancy(OLD)))


def test_the_teacher_does_not_count_where_it_is_nan():
    """Of half of the paths: the gradient is that of these alone, and the mean is over their tokens."""
    given, has = batch(POLICY), torch.arange(len(PATHS)) % 2 == 0
    given.teacher_logprobs = torch.where(has.repeat_interleave(T), given.teacher_logprobs, torch.nan)
    given.term_tokens = {"teacher": given.term_tokens["teacher"] * tokens_with_a_teacher(given)}
    rows = has.nonzero()[:, 0]
    for objective in (added(), own_term()):
        found = loss_gradient(objective, given)
        assert found.isfinite().all()
        part, tokens = given.select(rows), torch.arange(len(PATHS) * T).view(-1, T)[rows].flatten()
        close(found, gradient(lambda own, o=objective: policy_loss(part, of_paths(own)[tokens], None, o).loss))  # noqa: B023


def test_the_mean_of_a_term_is_over_the_tokens_that_have_a_teacher():
    """With the token mean, however the step is cut into parts."""
    given = batch(POLICY)
    given.teacher_logprobs = torch.where(torch.arange(len(PATHS) * T) < 2 * T, given.teacher_logprobs, torch.nan)
    objective = own_term()
    given.term_tokens = tokens_of_terms(objective.terms, given)
    sizes = term_sizes(given)["teacher"]
    assert sizes.tolist() == [3, 3, *[0] * 62]
    counts = TermCounts.of(sizes, 4)
    given.term_scales = {"teacher": counts.scales(mean_over_update, sizes.double(), sizes.double(), None)}
    logprobs = of_paths(POLICY)
    result = policy_loss(given, logprobs, None, objective)
    expected = (logprobs - of_paths(TEACHER))[: 2 * T].mean().item()
    assert result.loss.item() == pytest.approx(expected, abs=1e-12)
    (stats,) = read([result.stats])
    assert stats["teacher/kl"].value() == pytest.approx(expected) and stats["teacher/kl"].count == 6
    for parts in (2, 5):
        cut = 0.0
        for rows in torch.arange(len(PATHS)).tensor_split(parts):
            tokens = torch.arange(len(PATHS) * T).view(-1, T)[rows].flatten()
            cut += policy_loss(given.select(rows), logprobs[tokens], None, objective).loss.item()
        assert cut == pytest.approx(expected, abs=1e-12)


def test_rollouts_with_a_teacher_are_run_and_dropping_the_others_changes_nothing():
    given = batch(POLICY)
    has = (torch.arange(len(PATHS)) % 4 == 0).repeat_interleave(T)
    given.teacher_logprobs = torch.where(has, given.teacher_logprobs, torch.nan)
    given.term_tokens = {"teacher": given.term_tokens["teacher"] * has}
    kept = RolloutIndex.of(given).without_signal_dropped().rows
    assert kept.tolist() == list(range(0, 64, 4))
    tokens = torch.arange(len(PATHS) * T).view(-1, T)[kept].flatten()
    for objective in (added(), own_term()):
        part = given.select(kept)
        found = gradient(lambda own, o=objective: policy_loss(part, of_paths(own)[tokens], None, o).loss)  # noqa: B023
        close(loss_gradient(objective, given), found)


def test_a_bound_cuts_the_gap():
    given = batch(POLICY)
    gap = of_paths(TEACHER) - of_paths(POLICY)
    expected = batch(POLICY, teacher=None)
    expected.advantages = gap.clamp(-0.5, 0.5)
    wanted = loss_gradient(Objective(UNCLIPPED), expected)
    for objective in (added(clip=0.5), own_term(clip=0.5)):
        close(loss_gradient(objective, given), wanted)
    stats = policy_loss(given, of_paths(POLICY), None, own_term(clip=0.5)).stats
    assert read([stats])[0]["teacher/gap_clipped"].value() == pytest.approx((gap.abs() > 0.5).float().mean().item())


def test_a_function_of_gap_and_advantages_takes_their_place():
    """RLSD (arXiv 2604.03128): the advantage times a bounded exp(sign(A) gap)."""
    advantages = torch.randn(len(PATHS), generator=torch.Generator().manual_seed(4)).double()

    def rlsd(x):
        assert x.coef == 0.5 and x.tokens.all() and x.lengths.tolist() == [T] * len(PATHS)
        return x.advantages * (1 - x.coef + x.coef * (x.advantages.sign() * x.gap).exp().clamp(0.8, 1.2))

    given = batch(POLICY, advantages)
    expected = batch(POLICY, advantages, teacher=None)
    gap = of_paths(TEACHER) - of_paths(POLICY)
    expected.advantages = expected.advantages * (0.5 + 0.5 * (expected.advantages.sign() * gap).exp().clamp(0.8, 1.2))
    close(loss_gradient(added(0.5, advantage=rlsd), given), loss_gradient(Objective(UNCLIPPED), expected))


def test_the_weight_of_a_teacher_may_rise_and_fall_by_steps():
    schedule = {"warmup": 10, "peak": 0.8, "decay": 20, "valley": 0.2}
    weights = [peak_and_valley(step, **schedule) for step in (0, 5, 10, 20, 30, 99)]
    assert weights == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert peak_and_valley(0, warmup=0, peak=1.0, decay=0, valley=0.3) == 0.3
    (term,) = terms(runs.config("x", teacher="start", teacher_loss="divergence", teacher_schedule=schedule))
    assert term.coef(5) == pytest.approx(0.4)
    (term,) = terms(
        runs.config("x", teacher="start", teacher_loss="divergence", teacher_schedule=schedule, teacher_coef=0.5)
    )
    assert term.coef(10) == pytest.approx(0.4)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_config_chooses_between_advantage_and_term(method):
    make = grpo.algorithm
    none = make(runs.config("x")).objective
    assert none.terms == () and none.teacher is None
    gap = make(runs.config("x", teacher="start", teacher_coef=0.3, teacher_clip=2.0)).objective
    assert gap.teacher.coef(0) == 0.3 and gap.teacher.clip == 2.0 and gap.terms[0].coef(0) == 0.0
    term = make(runs.config("x", teacher="start", teacher_loss="divergence", teacher_coef=0.3)).objective
    assert term.teacher is None and term.terms[0].coef(0) == 0.3


def test_the_measured_gap_moves_nothing():
    """Where the gap is an advantage, the term of that name only measures."""
    (term,) = terms(runs.config("x", teacher="start"))
    both = Objective(UNCLIPPED, terms=(term,), teacher=TeacherAdvantage(added_gap, constant(1.0)))
    close(loss_gradient(both, batch(POLICY)), loss_gradient(added(), batch(POLICY)))


# ---- named tokens and a tail -----------------------------------------------------------------------------------------

BETAS = [0.0, 0.3, 0.5, 1.0]


def full_divergence(log_p, log_t, beta):
    """Over the whole vocabulary, literally: [..., V] -> [...]."""
    p, t = log_p.exp(), log_t.exp()
    if beta == 0:
        return (t * (log_t - log_p)).sum(-1)
    if beta == 1:
        return (p * (log_p - log_t)).sum(-1)
    m = (1 - beta) * p + beta * t
    return beta * (t * (log_t - m.log())).sum(-1) + (1 - beta) * (p * (log_p - m.log())).sum(-1)


def over_names(ids, beta):
    """The divergence of the policy's table over named tokens, per prefix."""
    return lambda own: binned_divergence(own.gather(1, ids), TEACHER.gather(1, ids), beta)


@pytest.mark.parametrize("beta", BETAS)
def test_all_but_one_token_and_a_tail_are_the_whole_vocabulary(beta):
    draws = (torch.randperm(V, generator=torch.Generator().manual_seed(row)) for row in range(len(PREFIXES)))
    ids = torch.stack([draw[: V - 1] for draw in draws])
    close(over_names(ids, beta)(POLICY), full_divergence(POLICY, TEACHER, beta))
    found = gradient(lambda own: over_names(ids, beta)(own).sum())
    close(found, gradient(lambda own: full_divergence(own, TEACHER, beta).sum()))


@pytest.mark.parametrize("beta", BETAS)
def test_fewer_names_give_less_and_the_gradient_of_the_bins(beta):
    """dD/dz_v = P_v (f'(bin of v) - Σ_b P_b f'(b)), f' the derivative of D in the policy's mass of a bin."""
    ids = torch.zeros(len(PREFIXES), 1, dtype=torch.long)
    assert (over_names(ids, beta)(POLICY) <= full_divergence(POLICY, TEACHER, beta) + 1e-12).all()
    p, t = (torch.stack([one.exp()[:, 0], 1 - one.exp()[:, 0]], 1) for one in (POLICY, TEACHER))
    masses = p.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(full_divergence(masses.log(), t.log(), beta).sum(), masses)
    of_token = torch.cat([slopes[:, :1], slopes[:, 1:].expand(-1, V - 1)], 1)
    expected = POLICY.exp() * (of_token - (p * slopes).sum(1, keepdim=True))
    close(gradient(lambda own: over_names(ids, beta)(own).sum()), expected)


@pytest.mark.parametrize("bins", ["whole", "named"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_goes_to_the_two_kls_by_a_factor_of_beta(dtype, bins):
    """Of P and T it is β KL(T || P) - β² / 2 (Σ T² / P - 1) + O(β³), and the same with P and T, β and 1 - β exchanged.

    At β = 1e-6 the second term is 1e-6 of the first times their χ² distance, which is 1 to 10 here.
    """
    small, ids = 1e-6, torch.arange(V - 1).expand(len(PREFIXES), -1)
    log_p, log_t = POLICY.to(dtype), TEACHER.to(dtype)

    def divided(beta):
        if bins == "whole":
            return whole_divergence(log_p, log_t, beta)[0] / small
        return binned_divergence(log_p.gather(1, ids), log_t.gather(1, ids), beta) / small

    forward, reverse = (full_divergence(POLICY, TEACHER, beta) for beta in (0.0, 1.0))
    for found, limit, nearer, farther in (
        (divided(small), forward, POLICY, TEACHER),
        (divided(1 - small), reverse, TEACHER, POLICY),
    ):
        torch.testing.assert_close(found.double(), limit, rtol=0, atol=2e-5)
        if dtype == torch.float64:
            chi = ((2 * farther - nearer).exp()).sum(1) - 1
            torch.testing.assert_close(found, limit - small / 2 * chi, rtol=0, atol=1e-9)


@pytest.mark.parametrize("beta", [*BETAS, 1e-6, 0.9, 1 - 1e-6])
def test_over_the_whole_vocabulary_value_and_slopes_are_those_of_the_definition(beta):
    logits = POLICY.clone().requires_grad_()
    expected = full_divergence(logits.log_softmax(1), TEACHER, beta)
    value, centre = whole_divergence(POLICY, TEACHER, beta)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-14)
    (slopes,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(divergence_slopes(POLICY, TEACHER, beta, centre), slopes, rtol=0, atol=1e-14)
    by_parts = [
        divergence_slopes(POLICY[:, part], TEACHER[:, part], beta, centre) for part in (slice(0, 3), slice(3, V))
    ]
    torch.testing.assert_close(torch.cat(by_parts, 1), slopes, rtol=0, atol=1e-14)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 0.999, 1 - 1e-6])
def test_a_mixture_keeps_its_digits_in_float32(beta):
    """log M / P is near 0 where β is; as a difference of two log-probs it would be rounding alone."""
    narrow = [one.float() for one in (POLICY, TEACHER)]
    wide = [one.double() for one in narrow]
    for found, expected in zip(log_mixture(*narrow, beta), log_mixture(*wide, beta), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    size = beta * (1 - beta)
    found, expected = (divergence_parts(*pair, beta).sum(1) / size for pair in (narrow, wide))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("beta", [0.3, 0.7])
def test_a_mixture_of_probabilities_that_are_far_apart_is_finite(beta):
    log_p = torch.tensor([0.0, -1e4, -80.0, -50.0])
    log_t = torch.tensor([-1e4, 0.0, -50.0, -80.0])
    of_p, of_t = log_mixture(log_p, log_t, beta)
    assert of_p[0].item() == pytest.approx(math.log(1 - beta), abs=1e-5)
    assert of_t[1].item() == pytest.approx(math.log(beta), abs=1e-5)
    assert of_p.isfinite().all() and of_t.isfinite().all()


def test_places_without_a_token_and_impossible_tokens_are_finite():
    log_p = torch.tensor([[math.log(0.5), -math.inf], [math.log(0.5), math.log(0.25)]], dtype=torch.float64)
    log_t = torch.tensor([[math.log(0.25), -math.inf], [math.log(0.25), -math.inf]], dtype=torch.float64)
    log_p.requires_grad_()
    for beta in BETAS:
        values = binned_divergence(log_p, log_t, beta)
        (slopes,) = torch.autograd.grad(values.sum(), log_p)
        assert values.isfinite().all() and slopes.isfinite().all()
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75)
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert binned_divergence(log_p, log_t, 1.0)[0].item() == pytest.approx(expected)


@pytest.mark.parametrize("beta", BETAS)
def test_a_term_of_named_tokens_is_the_divergence_at_visited_prefixes(beta):
    given = batch(POLICY)
    ids = torch.arange(V - 1).expand(len(PATHS) * T, -1)
    given.named_ids, given.teacher_tops = ids, TEACHER[AT.flatten()].gather(1, ids)
    config = runs.config("x", teacher="start", teacher_loss="divergence", teacher_top_k=3, teacher_beta=beta)
    objective = Objective(UNCLIPPED, terms=terms(config))
    assert objective.reads_named

    def loss(own):
        return policy_loss(given, of_paths(own), None, objective, named=own[AT.flatten()].gather(1, ids)).loss

    visited = occupancy(POLICY)
    close(gradient(loss), gradient(lambda own: (visited * full_divergence(own, TEACHER, beta)).sum()))
    named = POLICY[AT.flatten()].gather(1, ids)
    (stats,) = read([policy_loss(given, of_paths(POLICY), None, objective, named=named).stats])
    assert stats["teacher/student_mass"].value() == pytest.approx(named.exp().sum(1).mean().item())
    assert stats["teacher/top_mass"].value() == pytest.approx(given.teacher_tops.exp().sum(1).mean().item())


@pytest.mark.parametrize("beta", BETAS)
def test_a_term_over_the_whole_vocabulary_is_the_divergence_at_visited_prefixes(beta):
    given = batch(POLICY)
    config = runs.config("x", teacher="start", teacher_loss="divergence", teacher_top_k=-1, teacher_beta=beta)
    objective = Objective(UNCLIPPED, terms=terms(config))
    assert not objective.reads_named and objective.divergence_beta == beta

    def loss(own):
        divergence = full_divergence(own, TEACHER, beta)[AT.flatten()]
        return policy_loss(given, of_paths(own), None, objective, divergence=divergence).loss

    visited = occupancy(POLICY)
    close(gradient(loss), gradient(lambda own: (visited * full_divergence(own, TEACHER, beta)).sum()))


@pytest.mark.parametrize(("beta", "names"), [(0.0, (5, 0)), (1.0, (0, 5)), (0.5, (3, 2))])
def test_each_divergence_is_named_by_the_one_whose_mass_weighs_it(beta, names):
    assert split_names(5, beta) == names and split_names(-1, beta) == (0, 0)
