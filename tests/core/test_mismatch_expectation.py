"""What samples of another distribution teach on average, worked out by enumerating every completion there is.

A policy over three tokens writes two of them; an engine with other logits samples. The expected gradient is a sum over
the nine completions, each as likely as the engine makes it.
"""

import itertools
from functools import partial

import pytest
import torch

from covey.core.losses import clip
from covey.core.mismatch import mismatch_weights
from covey.core.objective import Objective, policy_loss
from tests.support.objective_cases import bare_batch

COMPLETIONS = list(itertools.product(range(3), repeat=2))
ADVANTAGES = torch.linspace(-1, 1, len(COMPLETIONS), dtype=torch.float64) ** 3 + 0.2
SURROGATE = partial(clip, epsilon_low=0.2, epsilon_high=0.2)


def logits(seed):
    """Of the first token [3], and of the second after each first [3, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


POLICY = logits(0)
ENGINE = POLICY + 0.4 * logits(1)


def logprobs(table):
    """Of both tokens of every completion, flat [18]."""
    normed = table.log_softmax(-1)
    return torch.stack([value for a, b in COMPLETIONS for value in (normed[0, a], normed[1 + a, b])])


def probabilities(table):
    """Of every completion, [9]."""
    return logprobs(table).view(-1, 2).sum(1).exp()


def expected_gradient(mode=None, low=None, high=None, sampled_by=ENGINE):
    """Of the loss with respect to the policy's logits, [12], where each completion comes as often as it is sampled."""
    table = POLICY.clone().requires_grad_()
    two = torch.full((len(COMPLETIONS),), 2)
    correction = None if mode is None else partial(mismatch_weights, mode=mode, clip_min=low, clip_max=high)
    batch = bare_batch(
        sampled=torch.ones(18, dtype=torch.bool),
        lengths=two,
        advantages=ADVANTAGES.repeat_interleave(2),
        weights=probabilities(sampled_by).detach().repeat_interleave(2),
        engine_logprobs=logprobs(sampled_by).detach(),
    )
    loss = policy_loss(batch, logprobs(table), None, Objective(SURROGATE, correction=correction)).loss
    return torch.autograd.grad(loss, table)[0].flatten()


WANTED = expected_gradient(sampled_by=POLICY)
"""The gradient of samples from the policy itself."""


def error(*settings):
    return (expected_gradient(*settings) - WANTED).norm().item()


def test_the_target_is_the_gradient_of_the_expected_advantage():
    table = POLICY.clone().requires_grad_()
    (-(probabilities(table) * ADVANTAGES).sum()).backward()
    torch.testing.assert_close(WANTED, table.grad.flatten())


def test_uncorrected_samples_of_another_distribution_are_biased():
    assert error() > 0.1 * WANTED.norm()


@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_unbounded_sequence_weights_give_the_exact_gradient(action):
    assert error(f"sequence_{action}") < 1e-12


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate"])
def test_bounded_weights_come_closer_to_it_than_none(mode):
    assert error(mode, None, 3.0) < 0.7 * error()


def test_an_engine_that_agrees_is_not_changed():
    for mode in ("token_truncate", "sequence_mask"):
        torch.testing.assert_close(expected_gradient(mode, 0.9, 1.1, sampled_by=POLICY), WANTED)
