"""Log-probs of named tokens and the likeliest ones are those of the whole softmax, values and gradients."""

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.lm_head import linear
from covey.policy.lm_head import scores as lm_head
from covey.policy.lm_head.scores import Head, score_hidden
from covey.policy.lm_head.support import SampledSupport
from covey.policy.scoring import TokenScorer
from tests.policy.test_lm_head import HIDDEN, WORDS, Doubled, case
from tests.policy.test_sampling_masks import masked_rollouts
from tests.policy.test_scoring import gradients, rollouts, scorer
from tests.support import tiny

NAMED = 5
INF = float("inf")


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Many: 15 numbers a tile, so that tokens and vocabulary are both cut, with leftovers."""
    if request.param == "many tiles":
        monkeypatch.setitem(linear.TILE_BYTES, "cpu", 15 * 8)
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", 3 * 4 * WORDS)


def named_of(targets, words=WORDS):
    """Five tokens at each position: at random, the position's own in every third, a repeated one, and some absent."""
    torch.manual_seed(1)
    named = torch.randint(words, (len(targets), NAMED))
    named[::3, 0] = targets[::3]
    named[1::3, 1] = named[1::3, 2]
    named[::2, 3] = -1
    return named


def loss_of(logprobs, named, entropies=None):
    """Weights of both signs, and a sum of 0 over the named tokens of row 0, where no factor can be taken out."""
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype)
    of_named = torch.linspace(2, -1, named.numel(), dtype=logprobs.dtype).view_as(named)
    of_named[0] = torch.tensor([1.0, -2.0, 1.0, 0.0, 0.0])
    loss = (weights * logprobs).sum() + torch.where(named > -INF, of_named * named, 0.0).sum() + named.exp().sum()
    return loss if entropies is None else loss + (0.3 * weights * entropies.square()).sum()


def naive(log_p, targets, named):
    """From the log-probs [N, V] of all words."""
    chosen = torch.where(named >= 0, log_p.gather(1, named.clamp_min(0)), -INF)
    finite = log_p.clamp_min(-1e4)
    return log_p.gather(1, targets[:, None])[:, 0], chosen, -(log_p.exp() * finite).sum(-1)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("settings", [{}, {"scale": 1.5, "soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize(
    ("kind", "frozen", "chunk_size"),
    [(torch.nn.Linear, False, 4), (torch.nn.Linear, False, 100), (torch.nn.Linear, True, 4), (Doubled, False, 4)],
    ids=["linear", "kept", "frozen", "called"],
)
def test_values_and_gradients_equal_the_naive_ones(kind, frozen, chunk_size, settings, entropy, tiles):
    hidden, targets, module = case(kind)
    module.requires_grad_(not frozen)
    named, head = named_of(targets), Head(module, **settings)
    leaves = [leaf for leaf in (hidden, *module.parameters()) if leaf.requires_grad]
    scores = score_hidden(
        hidden, targets, head, temperature=0.7, entropy=entropy, chunk_size=chunk_size, named=named, top=4
    )
    log_p = (head(hidden) / 0.7).log_softmax(-1)
    logprobs, chosen, entropies = naive(log_p, targets, named)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.named, chosen, rtol=0, atol=1e-12)
    top_logprobs, top_ids = log_p.topk(4)
    assert torch.equal(scores.top_ids, top_ids) and not scores.top_logprobs.requires_grad
    torch.testing.assert_close(scores.top_logprobs, top_logprobs, rtol=0, atol=1e-12)
    ours = loss_of(scores.logprobs, scores.named, scores.entropies)
    theirs = loss_of(logprobs, chosen, entropies if entropy else None)
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_sampling_masks_bound_named_and_likeliest_tokens(kind, penalty, tiles):
    batch = collate(masked_rollouts(WORDS))
    learned = batch.sampled.nonzero()[:, 0]
    targets, module = batch.token_ids[learned], kind(HIDDEN, WORDS).double()
    hidden = torch.randn(len(learned), HIDDEN, dtype=torch.float64, requires_grad=True)
    support = SampledSupport.of(batch, learned, penalty)
    named = named_of(targets)
    scores = score_hidden(
        hidden, targets, Head(module), temperature=0.7, entropy=True, chunk_size=4, support=support, named=named, top=6
    )
    z = module(hidden) / 0.7
    tile = support.tile(slice(0, len(learned)), 0, WORDS)
    z = torch.where(tile.penalised, torch.where(z > 0, z / penalty, z * penalty), z) if penalty != 1.0 else z
    log_p = z.masked_fill(tile.excluded, -INF).log_softmax(-1)
    chosen = naive(log_p, targets, named)[1]
    assert (chosen == -INF).sum() > (named == -1).sum()  # some named tokens could not be sampled
    torch.testing.assert_close(scores.named, chosen, rtol=0, atol=1e-12)
    kept = (log_p > -INF).sum(1)
    top_logprobs, top_ids = log_p.topk(6)
    beyond = torch.arange(6) >= kept[:, None]
    assert beyond.any() and torch.equal(scores.top_ids, top_ids.masked_fill(beyond, -1))
    torch.testing.assert_close(scores.top_logprobs, top_logprobs, rtol=0, atol=1e-12)
    leaves = [hidden, *module.parameters()]
    weights = torch.where(chosen > -INF, torch.linspace(-1, 1, chosen.numel()).view_as(chosen).double(), 0.0)

    def loss(logprobs, named, entropies):
        return (logprobs.square() + entropies.square()).sum() + (weights * torch.where(weights != 0, named, 0.0)).sum()

    ours = torch.autograd.grad(loss(scores.logprobs, scores.named, scores.entropies), leaves)
    usual = log_p.clamp_min(-1e4)  # autograd's own gradient of -inf is NaN
    theirs = torch.autograd.grad(loss(*naive(usual, targets, named)), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_a_gradient_of_an_absent_token_is_discarded(kind):
    hidden, targets, module = case(kind)
    named = named_of(targets)
    scores = score_hidden(hidden, targets, Head(module), temperature=1.0, entropy=False, chunk_size=4, named=named)
    # The usual trap of torch.where: the branch that is not taken gives 0 * inf.
    loss = torch.where(named >= 0, scores.named.exp() * scores.named, 0.0).sum()
    (expected,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    again = torch.where(named >= 0, scores.named, 0.0)
    (safe,) = torch.autograd.grad((again.exp() * again).sum(), hidden)
    torch.testing.assert_close(expected, safe, rtol=0, atol=1e-12)


def test_by_eye():
    # logits log [1/2, 1/4, 1/4, 0]: nothing of the fourth word, and the first is the likeliest
    module = torch.nn.Linear(1, 4, bias=False)
    module.weight.data = torch.tensor([[0.5], [0.25], [0.25], [0.0]]).log()
    scores = score_hidden(
        torch.ones(1, 1, requires_grad=True),
        torch.tensor([1]),
        Head(module),
        temperature=1.0,
        entropy=False,
        chunk_size=1,
        named=torch.tensor([[0, 3, -1, 0, 9]]),
        top=9,
    )
    assert scores.named.exp().tolist() == [[0.5, 0.0, 0.0, 0.5, 0.0]]  # 9 is beyond the vocabulary
    assert scores.top_ids[0, [0, 3]].tolist() == [0, -1] and set(scores.top_ids[0, 1:3].tolist()) == {1, 2}
    assert scores.top_logprobs.exp().tolist() == [[0.5, 0.25, 0.25, 0.0]]  # no more than the vocabulary
    assert scores.logprobs.exp().tolist() == [0.25]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_a_named_token_has_the_bits_of_a_target(kind, frozen, tiles):
    hidden, targets, module = case(kind)
    module.float().requires_grad_(not frozen)
    states, other = hidden.detach().float(), (targets + 3) % WORDS
    settings = {"temperature": 0.7, "entropy": False, "chunk_size": 4}
    alone = score_hidden(states, other, Head(module), **settings).logprobs
    beside = score_hidden(states, targets, Head(module), **settings, named=other[:, None])
    assert torch.equal(beside.named[:, 0], alone)
    assert torch.equal(beside.logprobs, score_hidden(states, targets, Head(module), **settings).logprobs)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_confident_named_token_keeps_its_small_gradient(frozen):
    # As for a target: 1 - p is 8e-6, little of which is left of a p in bfloat16. The target is another token.
    module = torch.nn.Linear(1, 3, bias=False).bfloat16().requires_grad_(not frozen)
    module.weight.data = torch.tensor([[12.0], [0.0], [-1.0]]).bfloat16()
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = score_hidden(
        hidden, torch.tensor([2]), Head(module), temperature=1.0, entropy=False, chunk_size=1, named=torch.tensor([[0]])
    )
    scores.named.sum().backward()
    p = torch.tensor([12.0, 0.0, -1.0], dtype=torch.float64).softmax(0)
    assert abs(hidden.grad.item() / (12 * (1 - p[0]) + p[2]).item() - 1) < 0.01


def test_an_empty_batch():
    hidden, targets, module = case()
    scores = score_hidden(
        hidden[:0],
        targets[:0],
        Head(module),
        temperature=1.0,
        entropy=False,
        chunk_size=4,
        named=targets.new_zeros(0, 3),
        top=2,
    )
    scores.named.sum().backward()
    assert scores.named.shape == (0, 3) and scores.top_ids.shape == (0, 2)
    assert not module.weight.grad.any() and not hidden.grad.any()


def log_p_of(model, episodes, temperature):
    """[N, V] log-probs at the positions of all completion tokens, one sequence at a time."""
    rows = []
    for episode in episodes:
        logits = model(torch.tensor([episode.prompt_ids + episode.completion_ids])).logits[0] / temperature
        first = len(episode.prompt_ids) - 1
        rows.append(logits[first : first + len(episode.completion_ids)].log_softmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", ["tied", "lora"])
def test_every_layout_scores_named_tokens(layout, inside, make):
    if make == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny.model(tie_word_embeddings=False), config).double()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.parameters = lambda: iter(trained)
    else:
        model = tiny.model().double().train()
    episodes = rollouts()
    batch, temperature = collate(episodes), 0.7
    other = (batch.token_ids + 11) % 104  # unlike the tokens that follow
    named = named_of(batch.token_ids, 104)
    scores = scorer(layout, temperature, chunk_size=4, inside_head_call=inside)(
        model, batch, entropy=True, targets=other, named=named, top=3
    )
    log_p = log_p_of(model, episodes, temperature)
    logprobs, chosen, entropies = naive(log_p, other, named)
    for ours, theirs in ((scores.logprobs, logprobs), (scores.named, chosen), (scores.entropies, entropies)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    top_logprobs, top_ids = log_p.topk(3)
    assert torch.equal(scores.top_ids, top_ids)
    torch.testing.assert_close(scores.top_logprobs, top_logprobs, rtol=1e-9, atol=1e-9)

    def every(logprobs, named, entropies):
        return gradients(model, loss_of(logprobs, named)[None], entropies)

    for mine, theirs in zip(
        every(scores.logprobs, scores.named, scores.entropies), every(logprobs, chosen, entropies), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-5)  # normalisation layers compute in float32


def test_unscored_positions_have_no_tokens(tiny_model):
    batch = collate(rollouts())
    named = named_of(batch.token_ids, 104)
    every = scorer()(tiny_model, batch, named=named, top=2)
    batch.sampled = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(3)) < 0.5
    some = scorer()(tiny_model, batch, named=named, top=2)
    sampled = batch.sampled[:, None]
    torch.testing.assert_close(some.named, torch.where(sampled, every.named, -INF))
    torch.testing.assert_close(some.top_logprobs, torch.where(sampled, every.top_logprobs, -INF))
    assert torch.equal(some.top_ids, torch.where(sampled, every.top_ids, -1))


def test_strands_score_each_token_once():
    rollout = Rollout([1, 2], [3, 4, 9, 5], [True, True, False, True], None, "", FinishReason.STOP, strands=[(2, 0)])
    model, batch = tiny.model().double(), collate([rollout])
    named = torch.tensor([[7, 3], [8, 4], [9, 9], [6, -1]])
    scores = TokenScorer(lambda m: m, temperature=1.0, layout="packed")(model, batch, named=named, top=1)
    first = model(torch.tensor([[1, 2, 3]])).logits[0, 1:].log_softmax(-1)
    second = model(torch.tensor([[1, 9]])).logits[0, 1].log_softmax(-1)
    expected = torch.stack([first[0, [7, 3]], first[1, [8, 4]]])
    torch.testing.assert_close(scores.named[:2], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(scores.named[3, 0], second[6], rtol=0, atol=1e-9)
    assert (scores.named[2] == -INF).all() and scores.named[3, 1] == -INF
    assert scores.top_ids[:, 0].tolist() == [first[0].argmax(), first[1].argmax(), -1, second.argmax()]
