"""Losses of the wire: values and gradients against their formulas, written once more in plain torch."""

import math

import pytest
import torch

from covey.tinker.errors import Refusal
from covey.tinker.learner import Row, loss_of_rows
from covey.tinker.losses import LOSSES, loss_of

LENGTHS = (3, 2)
Q = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0], dtype=torch.float64)
A = torch.tensor([1.0, -2.0, 0.5, -1.0, 2.0], dtype=torch.float64)
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
W = torch.tensor([0.0, 1.0, -0.5, 2.0, 1.0], dtype=torch.float64)
OFF = Q + torch.tensor([0.3, -0.4, 0.1, 1.6, -0.05], dtype=torch.float64)  # ratios 1.35, 0.67, 1.11, 4.95, 0.95


def gspo(p, low, high):
    total = 0.0
    for part in (slice(0, 3), slice(3, 5)):
        mask = MASK[part]
        s = ((p[part] - Q[part]) * mask).sum().div(mask.sum()).exp().detach()
        ratio = s * (p[part] - p[part].detach()).exp()
        total = total - torch.minimum(ratio * A[part], ratio.clamp(low, high) * A[part]).sum()
    return total


def ppo(p, low, high):
    r = (p - Q).exp()
    return -torch.minimum(r * A, r.clamp(low, high) * A).sum()


def cispo(p, low, high):
    return -((p - Q).exp().clamp(low, high).detach() * A * p).sum()


CASES = {
    "cross_entropy": [({}, lambda p: -(W * p).sum())],
    "importance_sampling": [({}, lambda p: -((p - Q).exp() * A).sum())],
    "ppo": [
        ({}, lambda p: ppo(p, 0.8, 1.2)),
        ({"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, lambda p: ppo(p, 0.5, 3.0)),
    ],
    "cispo": [
        ({}, lambda p: cispo(p, 0.0, 4.0)),
        ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, lambda p: cispo(p, 0.9, 1.1)),
    ],
    "dro": [({"beta": 0.05}, lambda p: -(A * p - 0.025 * (p - Q) ** 2).sum())],
    "gspo": [
        ({}, lambda p: gspo(p, 1 - 3e-4, 1 + 4e-4)),
        ({"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, lambda p: gspo(p, 0.5, 2.0)),
    ],
}


def rows(name, *, q=Q, a=A, w=W):
    loss = LOSSES[name]
    given = {"weights": w, "logprobs": q, "advantages": a, "sequence_ratio_mask": MASK}
    made, start = [], 0
    for length in LENGTHS:
        part = slice(start, start := start + length)
        inputs = {key: given[key][part] for key in (*loss.needs, *loss.may) if key in given}
        counts = inputs[loss.counts] != 0
        if loss.counts_too:
            counts = counts | (inputs[loss.counts_too] != 0)
        made.append(Row([1] * length, {"target_tokens": torch.ones(length, dtype=torch.long), **inputs}, counts))
    return made


@pytest.mark.parametrize("p", [Q, OFF], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("name", "case"), [(name, number) for name in CASES for number in range(len(CASES[name]))])
def test_a_loss_and_its_gradient_are_those_of_the_formula(name, case, p):
    given, formula = CASES[name][case]
    loss, config = loss_of(name, given)
    ours, theirs = (p.clone().requires_grad_() for _ in range(2))
    value, expected = loss_of_rows(ours, rows(name), loss, config), formula(theirs)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_a_position_that_does_not_count_may_hold_any_number(name):
    # the prompt of a sample is sent with log-prob and advantage 0, and its target may be impossible
    p = OFF.clone()
    p[0] = -math.inf
    p.requires_grad_()
    q, a = Q.clone(), A.clone()
    q[0] = a[0] = 0.0
    loss, config = loss_of(name, {"beta": 0.05} if name == "dro" else {})
    value = loss_of_rows(p, rows(name, q=q, a=a), loss, config)
    value.backward()
    assert value.isfinite() and p.grad.isfinite().all() and p.grad[0] == 0


def test_thresholds_are_ratios():
    # r = 1.35 at advantage 1 is cut at 1.2, so that the loss is -1.2 and has no gradient
    p = OFF[:1].clone().requires_grad_()
    row = Row([1], {"logprobs": Q[:1], "advantages": A[:1]}, torch.tensor([True]))
    value = loss_of_rows(p, [row], *loss_of("ppo", {}))
    value.backward()
    assert value.item() == pytest.approx(-1.2) and p.grad.item() == 0


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("stable_reinforce", {}, "loss_fn=importance_sampling"),
        ("nonsense", {}, "cross_entropy"),
        ("ppo", {"epsilon": 0.2}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold"),
        ("cispo", {"clip_high_threshold": "4"}, "clip_high_threshold"),
        ("dro", {}, "beta"),
        ("cross_entropy", {"beta": 1.0}, "beta"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(name, config, told):
    with pytest.raises(Refusal) as refused:
        loss_of(name, config)
    assert told in str(refused.value)
