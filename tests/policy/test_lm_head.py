"""Log-probabilities and entropies from hidden states equal the naive ones, values and gradients."""

import pytest
import torch
from torch.autograd import gradcheck

from covey.policy.lm_head import linear
from covey.policy.lm_head import scores as lm_head
from covey.policy.lm_head.scores import Head, LogprobAndEntropy, plain_linear, score_hidden

TOKENS, HIDDEN, WORDS = 10, 6, 17


class Doubled(torch.nn.Linear):
    """No plain linear layer, so it is called as a module; and it gives twice what one does."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Many: 15 numbers a tile, so that tokens and vocabulary are both cut, with leftovers."""
    if request.param == "many tiles":
        monkeypatch.setitem(linear.TILE_BYTES, "cpu", 15 * 8)
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", 3 * 4 * WORDS)


def case(kind=torch.nn.Linear, bias=True, seed=0):
    """Hidden states [10, 6], targets [10] and a head [17, 6], float64."""
    torch.manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(WORDS, (TOKENS,)), kind(HIDDEN, WORDS, bias=bias).double()


def naive(head, hidden, targets, temperature):
    """From all logits at once; -inf is replaced by what gives a probability of 0."""
    log_p = (head(hidden) / temperature).clamp_min(-1e4).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_of(logprobs, entropies=None):
    weights = torch.linspace(-1, 1, TOKENS, dtype=logprobs.dtype)
    return (logprobs * weights).sum() + (0 if entropies is None else (entropies.square() * weights.flip(0)).sum())


def check(head, hidden, targets, temperature=1.0, entropy=False, differentiate_entropy=False, chunk_size=4):
    parameters = [p for p in (hidden, *head.module.parameters()) if p.requires_grad]
    scores = score_hidden(hidden, targets, head, temperature=temperature, entropy=entropy, chunk_size=chunk_size)
    expected = naive(head, hidden, targets, temperature)
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=0, atol=1e-12)
    assert (scores.entropies is not None) == entropy
    if entropy:
        torch.testing.assert_close(scores.entropies, expected[1], rtol=0, atol=1e-12)
    ours, theirs = (loss_of(*pair[: 1 + differentiate_entropy]) for pair in (scores, expected))
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_width_is_that_of_the_weights_unless_they_are_packed():
    swapped, packed = torch.nn.Linear(HIDDEN, WORDS), torch.nn.Linear(HIDDEN, WORDS)
    swapped.in_features, swapped.out_features = WORDS, HIDDEN  # as PEFT declares a head that it ties to embeddings
    packed.weight = torch.nn.Parameter(torch.zeros(WORDS * HIDDEN // 2, 1, dtype=torch.uint8), requires_grad=False)
    heads = (torch.nn.Linear(HIDDEN, WORDS), swapped, packed, torch.nn.Embedding(WORDS, HIDDEN))
    assert [Head(module).width for module in heads] == [WORDS] * 4


@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("settings", [{}, {"scale": 0.25}, {"soft_cap": 0.7}, {"scale": 1.5, "soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_scores_and_gradients_equal_the_naive_ones(kind, bias, settings, temperature, chunk_size, tiles):
    hidden, targets, module = case(kind, bias)
    for entropy, differentiate in ((False, False), (True, False), (True, True)):
        check(Head(module, **settings), hidden, targets, temperature, entropy, differentiate, chunk_size)


@pytest.mark.parametrize("settings", [{}, {"scale": 0.25}, {"soft_cap": 0.7}], ids=str)
def test_a_frozen_head_gives_the_same_gradient(settings, tiles):
    hidden, targets, module = case()
    module.requires_grad_(False)
    for entropy, differentiate in ((False, False), (True, False), (True, True)):
        check(Head(module, **settings), hidden, targets, 0.7, entropy, differentiate)


@pytest.mark.parametrize("settings", [{}, {"scale": 0.25}, {"soft_cap": 0.7}], ids=str)
def test_bias_trains_with_a_frozen_weight(settings, tiles):
    hidden, targets, module = case()
    module.weight.requires_grad_(False)
    for entropy in (False, True):
        check(Head(module, **settings), hidden, targets, 0.7, entropy)
        check(Head(module, **settings), hidden.detach(), targets, 0.7, entropy)


def test_weight_gets_a_gradient_without_hidden_gradients(tiles):
    hidden, targets, module = case()
    check(Head(module), hidden.detach(), targets, entropy=True)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Doubled])
def test_masked_tokens_leave_entropies_and_gradients_finite(kind, tiles):
    hidden, targets, module = case(kind)
    module.bias.data[[0, 1, 2, 3, 9]] = -torch.inf  # a whole first tile, and one word elsewhere
    targets = torch.tensor([4, 5, 6, 7, 8, 10, 11, 12, 13, 14])
    check(Head(module), hidden, targets, entropy=True, differentiate_entropy=True)


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_finite_differences(entropy, tiles):
    hidden, targets, module = case()

    def scores(hidden, weight, bias):
        curve = lm_head.Curve.of(1.5, 2.0, 0.7)
        plan = lm_head.plan_of(hidden, weight, bias, curve, entropy=entropy, compute=torch.float64, chunk_size=4)
        return tuple(x for x in lm_head.LinearHead.apply(hidden, weight, bias, targets[:, None], plan) if x is not None)

    assert gradcheck(scores, (hidden, module.weight, module.bias))
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: LogprobAndEntropy.apply(x, torch.tensor([[0], [3], [6]]), True, 0.5, [])[:2], (logits,))


def test_kept_exponentials_give_the_same_gradients_twice(tiles, monkeypatch):
    hidden, targets, module = case()

    def gradients(kept_bytes):
        monkeypatch.setitem(linear.KEPT_BYTES, "cpu", kept_bytes)
        scores = score_hidden(hidden, targets, Head(module), temperature=0.7, entropy=False, chunk_size=TOKENS)
        saved = sum(tensor.numel() for tensor in scores.logprobs.grad_fn.saved_tensors if tensor is not None)
        loss = loss_of(scores.logprobs)
        return saved, [torch.autograd.grad(loss, (hidden, *module.parameters()), retain_graph=True) for _ in range(2)]

    (fewer, (expected, _)), (more, found) = gradients(0), gradients(2**20)
    assert more - fewer >= TOKENS * WORDS
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_scores_by_eye():
    # logits log [1/2, 1/4, 1/4]: log p_0 = -log 2, H = log 2 / 2 + log 4 / 2 = 1.5 log 2
    module = torch.nn.Linear(1, 3, bias=False)
    module.weight.data = torch.tensor([[0.5], [0.25], [0.25]]).log()
    scores = score_hidden(
        torch.ones(1, 1), torch.tensor([0]), Head(module), temperature=1.0, entropy=True, chunk_size=1
    )
    torch.testing.assert_close(scores.logprobs, -torch.tensor([2.0]).log())
    torch.testing.assert_close(scores.entropies, 1.5 * torch.tensor([2.0]).log())


def test_empty_batch_scores():
    hidden, targets, module = case()
    scores = score_hidden(hidden[:0], targets[:0], Head(module), temperature=1.0, entropy=True, chunk_size=4)
    scores.logprobs.sum().backward()
    assert len(scores.logprobs) == len(scores.entropies) == 0
    assert not module.weight.grad.any() and not hidden.grad.any()


def test_a_tied_embedding_gets_both_of_its_gradients(tiles):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(WORDS, HIDDEN).double()
    module = torch.nn.Linear(HIDDEN, WORDS, bias=False)
    module.weight = embedding.weight
    ids, targets = torch.randint(WORDS, (2, TOKENS))
    expected = torch.autograd.grad(loss_of(naive(module, embedding(ids).tanh(), targets, 1.0)[0]), embedding.weight)
    scores = score_hidden(embedding(ids).tanh(), targets, Head(module), temperature=1.0, entropy=False, chunk_size=4)
    loss_of(scores.logprobs).backward()
    torch.testing.assert_close(embedding.weight.grad, expected[0], rtol=0, atol=1e-10)


def test_scores_are_deterministic(tiles):
    def once():
        hidden, targets, module = case()
        module.float()
        states = hidden.detach().float().requires_grad_()
        scores = score_hidden(states, targets, Head(module), temperature=0.9, entropy=True, chunk_size=4)
        loss_of(*scores[:2]).backward()
        return *scores[:2], states.grad, module.weight.grad, module.bias.grad

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("how", ["weights", "autocast", "float32 head", "float32 head under autocast"])
@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_is_as_exact_as_its_products(how, frozen, tiles):
    torch.manual_seed(0)
    module = torch.nn.Linear(HIDDEN, WORDS)
    hidden = torch.randn(TOKENS, HIDDEN)
    targets = torch.randint(WORDS, (TOKENS,))
    if how != "autocast":
        module, hidden = module.bfloat16(), hidden.bfloat16()
    wide, states = torch.nn.Linear(HIDDEN, WORDS).double(), hidden.double().requires_grad_()
    wide.load_state_dict(module.state_dict())
    expected = naive(wide, states, targets, 1.0)[0]
    loss_of(expected).backward()

    hidden.requires_grad_()
    module.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
        head = Head(module, float32="float32" in how)
        scores = score_hidden(hidden, targets, head, temperature=1.0, entropy=False, chunk_size=4)
    loss_of(scores.logprobs).backward()
    assert scores.logprobs.dtype == torch.float32 and hidden.grad.dtype == hidden.dtype
    exact = "float32" in how
    torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-5 if exact else 2**-6)
    # Gradients come in the inputs' type: bfloat16 ones are rounded to 2^-9 of themselves, were all else exact.
    torch.testing.assert_close(hidden.grad.double(), states.grad, rtol=2**-8, atol=1e-5 if exact else 2**-6)
    if not frozen:
        torch.testing.assert_close(
            module.weight.grad.double(), wide.weight.grad, rtol=2**-8, atol=1e-5 if exact else 2**-5
        )


@pytest.mark.parametrize("frozen", [False, True])
def test_a_confident_token_keeps_its_small_gradient(frozen):
    # 1 - p_y is 8e-6 here: little of it would be left of a p_y in bfloat16, or of exp(z - log Z) in float32.
    module = torch.nn.Linear(1, 3, bias=False).bfloat16().requires_grad_(not frozen)
    module.weight.data = torch.tensor([[12.0], [0.0], [-1.0]]).bfloat16()
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = score_hidden(hidden, torch.tensor([0]), Head(module), temperature=1.0, entropy=False, chunk_size=1)
    scores.logprobs.sum().backward()
    p = torch.tensor([12.0, 0.0, -1.0], dtype=torch.float64).softmax(0)
    assert abs(hidden.grad.item() / (12 * (1 - p[0]) + p[2]).item() - 1) < 0.01
    assert abs(scores.logprobs.item() / p[0].log().item() - 1) < 0.01


def test_only_plain_linear_heads_are_tiled():
    plain = torch.nn.Linear(2, 3)
    assert plain_linear(plain) is plain
    assert plain_linear(Doubled(2, 3)) is None
    hooked = torch.nn.Linear(2, 3)
    hooked.register_forward_hook(lambda module, args, output: output)
    assert plain_linear(hooked) is None
    replaced = torch.nn.Linear(2, 3)
    replaced.forward = lambda x: x
    assert plain_linear(replaced) is None


def test_sharded_head_error_names_the_remedy():
    class Sharded:
        weight = type("Weight", (), {"full_tensor": None})()

    with pytest.raises(ValueError, match="inside_head_call=True"):
        score_hidden(
            torch.zeros(1, 2), torch.tensor([0]), Head(Sharded()), temperature=1.0, entropy=False, chunk_size=4
        )
