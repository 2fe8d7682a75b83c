"""Divergences over the whole vocabulary, without the logits of all tokens: values and gradients equal theirs."""

import pytest
import torch

from covey.core.batch import collate, join
from covey.core.findings import CheckError
from covey.policy.lm_head import linear
from covey.policy.lm_head.scores import Head, check_plain_head, head_of, score_hidden, teacher_head
from covey.policy.lm_head.support import SampledSupport
from covey.policy.lm_head.teacher import TeacherHead, TeacherRows
from covey.policy.scoring import Teachers
from tests.core.test_distillation import full_divergence
from tests.policy.test_lm_head import HIDDEN, TOKENS, WORDS, Doubled, case, tiles  # noqa: F401
from tests.policy.test_lm_head_memory import LargestTensor
from tests.policy.test_sampling_masks import masked_rollouts
from tests.policy.test_scoring import gradients, rollouts, scorer
from tests.support import tiny

BETAS = [0.0, 0.3, 0.5, 1.0]
INF = float("inf")
WIDTH = 4  # of the teacher's hidden states


def taught(beta, words=WORDS, tokens=TOKENS, seed=3, temperature=0.7, **curve):
    torch.manual_seed(seed)
    head = TeacherHead(torch.randn(words, WIDTH).double(), torch.randn(words).double(), **curve)
    return TeacherRows((head,), torch.randn(tokens, WIDTH).double(), None, beta, temperature)


def teacher_logits(rows, number=0):
    """[N, V] at the temperature, at once."""
    head = rows.heads[number]
    z = (rows.hidden[:, : head.weight.shape[1]] @ head.weight.T + head.bias) * head.scale
    return (torch.tanh(z / head.soft_cap) * head.soft_cap if head.soft_cap else z) / rows.temperature


def loss_of(divergence, logprobs, named=None, entropies=None):
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    loss = (weights * divergence).sum() + 0.5 * (weights.flip(0) * logprobs).sum()
    loss = loss if named is None else loss + named.exp().square().sum()
    return loss if entropies is None else loss + (entropies * weights).square().sum()


def assert_gradients(ours, theirs, leaves):
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "with entropies and named tokens"])
@pytest.mark.parametrize("settings", [{}, {"scale": 1.5, "soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize(
    ("kind", "frozen", "chunk_size"),
    [(torch.nn.Linear, False, 4), (torch.nn.Linear, False, 100), (torch.nn.Linear, True, 4), (Doubled, False, 4)],
    ids=["linear", "one chunk", "frozen", "called"],
)
def test_values_and_gradients_equal_those_of_all_logits(kind, frozen, chunk_size, settings, more, beta, tiles):  # noqa: F811
    hidden, targets, module = case(kind)
    module.requires_grad_(not frozen)
    head, teacher = Head(module, **settings), taught(beta, scale=2.0, soft_cap=3.0)
    named = torch.stack([targets, (targets + 5) % WORDS], 1) if more else None
    options = {"temperature": 0.7, "entropy": more, "chunk_size": chunk_size, "named": named, "top": 2 * more}
    scores = score_hidden(hidden, targets, head, **options, teacher=teacher)
    log_p = (head(hidden) / 0.7).log_softmax(1)
    expected = full_divergence(log_p, teacher_logits(teacher).log_softmax(1), beta)
    torch.testing.assert_close(scores.divergence, expected, rtol=0, atol=1e-12)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=1e-12)
    others = (log_p.gather(1, named), -(log_p.exp() * log_p).sum(1)) if more else ()
    leaves = [leaf for leaf in (hidden, *module.parameters()) if leaf.requires_grad]
    ours = loss_of(scores.divergence, scores.logprobs, *((scores.named, scores.entropies) if more else ()))
    assert_gradients(ours, loss_of(expected, logprobs, *others), leaves)


@pytest.mark.parametrize("beta", BETAS)
def test_the_other_scores_are_the_same_with_a_teacher(beta):
    hidden, targets, module = case()
    options = {"temperature": 0.7, "entropy": True, "chunk_size": 4, "top": 3}
    without = score_hidden(hidden, targets, Head(module), **options)
    scores = score_hidden(hidden, targets, Head(module), **options, teacher=taught(beta))
    for name in ("logprobs", "entropies", "top_logprobs"):
        torch.testing.assert_close(getattr(scores, name), getattr(without, name), rtol=0, atol=1e-12)
    assert torch.equal(scores.top_ids, without.top_ids)


@pytest.mark.parametrize("beta", BETAS)
def test_positions_have_teachers_of_their_own(beta, tiles):  # noqa: F811
    """Two heads of other widths, and rows without a teacher, whose divergence nothing reads."""
    hidden, targets, module = case()
    one, two = taught(beta), taught(beta, seed=5)
    narrow = TeacherHead(two.heads[0].weight[:, :2].contiguous(), two.heads[0].bias)
    numbers = torch.arange(TOKENS) % 3 - 1
    rows = TeacherRows((one.heads[0], narrow), one.hidden, numbers, beta, 0.7)
    scores = score_hidden(hidden, targets, Head(module), temperature=0.7, entropy=False, chunk_size=4, teacher=rows)
    log_p = (module(hidden) / 0.7).log_softmax(1)
    of = [full_divergence(log_p, teacher_logits(rows, n).log_softmax(1), beta) for n in (0, 1)]
    expected = torch.where(numbers == 0, of[0], torch.where(numbers == 1, of[1], 0.0))
    ours = torch.where(numbers >= 0, scores.divergence, 0.0)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    leaves = [hidden, *module.parameters()]
    assert_gradients(loss_of(ours, scores.logprobs), loss_of(expected, log_p.gather(1, targets[:, None])[:, 0]), leaves)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_a_teacher_with_fewer_words_gives_the_others_nothing(kind, beta, tiles):  # noqa: F811
    hidden, targets, module = case(kind)
    teacher = taught(beta, words=WORDS - 3)
    scores = score_hidden(hidden, targets, Head(module), temperature=0.7, entropy=False, chunk_size=4, teacher=teacher)
    log_p = (module(hidden) / 0.7).log_softmax(1)
    log_t = torch.nn.functional.pad(teacher_logits(teacher).log_softmax(1), (0, 3), value=-50.0)
    expected = full_divergence(log_p, log_t, beta)
    torch.testing.assert_close(scores.divergence, expected, rtol=0, atol=1e-12)
    assert_gradients(scores.divergence.sum(), expected.sum(), [hidden, *module.parameters()])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_both_are_restricted_to_what_was_sampled_from(kind, penalty, beta, tiles):  # noqa: F811
    batch = collate(masked_rollouts(WORDS))
    learned = batch.sampled.nonzero()[:, 0]
    targets, module = batch.token_ids[learned], kind(HIDDEN, WORDS).double()
    hidden = torch.randn(len(learned), HIDDEN, dtype=torch.float64, requires_grad=True)
    support, teacher = SampledSupport.of(batch, learned, penalty), taught(beta, tokens=len(learned))
    options = {"temperature": 0.7, "entropy": False, "chunk_size": 4, "support": support}
    scores = score_hidden(hidden, targets, Head(module), **options, teacher=teacher)
    tile = support.tile(slice(0, len(learned)), 0, WORDS)

    def log_probs(z):
        z = torch.where(tile.penalised, torch.where(z > 0, z / penalty, z * penalty), z) if penalty != 1.0 else z
        return z.masked_fill(tile.excluded, -INF).log_softmax(1).clamp_min(-50.0)  # autograd's gradient of -inf is NaN

    expected = full_divergence(log_probs(module(hidden) / 0.7), log_probs(teacher_logits(teacher)), beta)
    torch.testing.assert_close(scores.divergence, expected, rtol=0, atol=1e-11)
    assert scores.divergence.isfinite().all()
    assert_gradients(scores.divergence.sum(), expected.sum(), [hidden, *module.parameters()])


def test_a_teacher_that_is_the_policy_is_at_no_distance():
    hidden, targets, module = case()
    same = TeacherRows((TeacherHead(module.weight.detach(), module.bias.detach()),), hidden.detach(), None, 1.0, 0.7)
    scores = score_hidden(hidden, targets, Head(module), temperature=0.7, entropy=False, chunk_size=4, teacher=same)
    (grad,) = torch.autograd.grad(scores.divergence.sum(), hidden)
    assert scores.divergence.abs().max() < 1e-15 and grad.abs().max() < 1e-15


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("tokens", "words"), [(300, 4000), (3000, 400)])
def test_the_largest_tensor_is_a_tile(tokens, words, frozen, beta, monkeypatch):
    tile = 64 * 1024
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", tile)
    module = torch.nn.Linear(8, words).requires_grad_(not frozen)
    hidden, targets = torch.randn(tokens, 8, requires_grad=True), torch.randint(words, (tokens,))
    teacher = TeacherRows((TeacherHead(torch.randn(words, 8)),), torch.randn(tokens, 8), None, beta, 1.0)
    with LargestTensor() as largest:
        options = {"temperature": 1.0, "entropy": False, "chunk_size": 128}
        score_hidden(hidden, targets, Head(module), **options, teacher=teacher).divergence.sum().backward()
    inputs = 4 * 8 * max(tokens, words)
    assert largest.bytes <= max(tile, inputs) < 4 * tokens * words / 8


def test_half_precision_sums_in_float32():
    """Products are rounded to bfloat16 once, as everywhere; the divergence of these logits is exact to float32."""
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 50, bias=False).bfloat16()
    hidden, weight = torch.randn(20, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    states = torch.randn(20, 8).bfloat16()
    rows = TeacherRows((TeacherHead(weight),), states, None, 1.0, 1.0)
    options = {"temperature": 1.0, "entropy": False, "chunk_size": 4}
    scores = score_hidden(hidden, torch.zeros(20).long(), Head(module), **options, teacher=rows)
    log_p, log_t = ((a @ b.T).double().log_softmax(1) for a, b in ((hidden, module.weight), (states, weight)))
    assert scores.divergence.dtype == torch.float32
    torch.testing.assert_close(scores.divergence.double(), full_divergence(log_p, log_t, 1.0), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["after the model", "inside the head's call"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_hidden_states_kept_by_one_pass_give_the_divergence_in_another(layout, inside):
    batch, policy, other = collate(rollouts()), tiny.model().double(), tiny.model(seed=1).double()
    made = scorer(layout=layout, inside_head_call=inside)
    with torch.no_grad():
        kept = made(other, batch, hidden=True)
        batch.teacher_hidden = kept.hidden
        log_t = torch.stack(
            [made(other, batch, targets=torch.full_like(batch.token_ids, v)).logprobs for v in range(104)], 1
        )
    teachers = Teachers((teacher_head(head_of(other)),), 0.5)
    found = made(policy, batch, teachers=teachers).divergence
    every = torch.arange(104).expand(batch.num_tokens, -1)
    log_p = made(policy, batch, named=every).named
    learned = batch.sampled
    expected = torch.where(learned, full_divergence(log_p.clamp_min(-1e4), log_t, 0.5), 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (kept.hidden[~learned] == 0).all() and found[learned].min() > 1e-3
    for mine, theirs in zip(gradients(policy, found, found), gradients(policy, expected, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)


def test_hidden_states_go_with_their_tokens_and_keep_their_dtype():
    one, two = collate(rollouts()), collate(rollouts())
    one.teacher_hidden = torch.ones(one.num_tokens, 3, dtype=torch.bfloat16)
    one.teacher_numbers = torch.zeros(one.num_tokens, dtype=torch.long)
    both = join([one, two])
    assert both.teacher_hidden.dtype == torch.bfloat16 and both.teacher_hidden.shape == (2 * one.num_tokens, 3)
    assert both.teacher_hidden.sum(1).tolist() == [3.0] * one.num_tokens + [0.0] * one.num_tokens
    assert both.teacher_numbers.tolist() == [0] * one.num_tokens + [-1] * one.num_tokens


def test_a_head_that_is_not_plainly_linear_cannot_be_read_twice():
    with pytest.raises(CheckError) as error:
        check_plain_head(Head(Doubled(3, 5)))
    assert error.value.codes == ["teacher-head"]
