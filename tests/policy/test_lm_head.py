"""Log-probabilities and entropies from logits, with their gradients."""

import torch
from torch.autograd import gradcheck

from covey.policy.lm_head import LogprobAndEntropy, score_hidden


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 6])
    assert gradcheck(lambda x: LogprobAndEntropy.apply(x, targets, True), (logits,))
    assert gradcheck(lambda x: LogprobAndEntropy.apply(x, targets, False)[0], (logits,))


def test_values_by_eye():
    # p = [1/2, 1/4, 1/4]: log p_0 = -log 2, H = log 2 / 2 + log 4 / 2 = 1.5 log 2
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logprobs, entropies = LogprobAndEntropy.apply(logits, torch.tensor([0]), True)
    torch.testing.assert_close(logprobs, -torch.tensor([2.0]).log())
    torch.testing.assert_close(entropies, 1.5 * torch.tensor([2.0]).log())


def test_ruled_out_tokens_do_not_spoil_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = LogprobAndEntropy.apply(logits, torch.tensor([1]), True)
    (logprobs + entropies).sum().backward()
    torch.testing.assert_close(entropies, torch.tensor([2.0]).log())
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_chunks_change_nothing():
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11).double()
    hidden = torch.randn(10, 5, dtype=torch.float64)
    targets = torch.randint(11, (10,))
    results = []
    for size in (1, 3, 100):
        states = hidden.clone().requires_grad_()
        scores = score_hidden(states, targets, head, temperature=0.5, entropy=True, chunk_size=size)
        (scores.logprobs.sum() + scores.entropies.sum()).backward()
        results.append((scores.logprobs, scores.entropies, states.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)
