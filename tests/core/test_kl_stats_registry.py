"""KL estimators, metric values that know their reduction, and the registry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.losses import KL_ESTIMATORS, k1, k2, k3
from covey.core.stats import Max, Mean, Min, Sum, merge_all
from covey.runtime.registry import Registry


def test_the_estimators_of_one_ratio():
    # log(p/q) = log 2
    p, q, log2 = torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)]), math.log(2)
    assert k1(p, q).item() == pytest.approx(log2)
    assert k2(p, q).item() == pytest.approx(log2**2 / 2)
    assert k3(p, q).item() == pytest.approx(0.5 + log2 - 1)


@pytest.mark.parametrize(("name", "exact"), [("k1", True), ("k2", False), ("k3", True)])
def test_unbiased_estimators_average_to_the_exact_divergence(name, exact):
    """Summed over a distribution of four tokens, weighted by p: no sampling needed."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum().item()
    estimate = (p * KL_ESTIMATORS[name](p.log(), q.log())).sum().item()
    assert (estimate == pytest.approx(divergence)) is exact


def test_k2_has_the_true_gradient_on_policy_and_corrected_k3_too():
    """d/dθ KL = Σ p log(p/q) d log p (the constant vanishes); the p-weighted estimators' gradients equal it."""
    theta = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64).log()
    logp = theta.log_softmax(0)
    weight = logp.exp().detach()
    true = torch.autograd.grad((logp.exp() * (logp - q)).sum(), theta, retain_graph=True)[0]
    by_k2 = torch.autograd.grad((weight * k2(logp, q)).sum(), theta, retain_graph=True)[0]
    ratio = (logp - logp.detach()).exp()
    by_k3 = torch.autograd.grad((weight * ratio * k3(logp, q)).sum(), theta, retain_graph=True)[0]
    torch.testing.assert_close(by_k2, true)
    torch.testing.assert_close(by_k3, true)


@given(p=st.floats(-20, 0), q=st.floats(-20, 0))
def test_k2_and_k3_are_never_negative_and_zero_for_equals(p, q):
    p, q = torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    for estimator in (k2, k3):
        assert estimator(p, q).item() >= -1e-12
        assert estimator(p, p).item() == 0


def test_a_mean_of_uneven_parts_is_the_mean_of_all():
    assert Mean.of([1.0, 2.0, 3.0]).merge(Mean.of([10.0])).value() == 4.0
    assert Mean.of([1.0, math.nan]).value() == 1.0
    assert math.isnan(Mean.of([]).value())


def test_extremes_ignore_nan():
    assert Min(math.nan).merge(Min(2.0)).merge(Min(math.nan)).value() == 2.0
    assert Max(1.0).merge(Max(math.nan)).merge(Max(3.0)).value() == 3.0
    assert math.isnan(Min(math.nan).merge(Min(math.nan)).value())
    assert Sum(1.0).merge(Sum(2.5)).value() == 3.5


@given(parts=st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=4), min_size=1, max_size=5))
def test_merging_in_any_grouping_gives_the_value_of_everything(parts):
    merged = {}
    for part in parts:
        merge_all(merged, {"mean": Mean.of(part), "min": Min(min(part)), "max": Max(max(part)), "sum": Sum(sum(part))})
    everything = [x for part in parts for x in part]
    assert {name: stat.value() for name, stat in merged.items()} == pytest.approx(
        {
            "mean": sum(everything) / len(everything),
            "min": min(everything),
            "max": max(everything),
            "sum": sum(everything),
        }
    )


def test_merge_all_adds_new_names_and_works_in_place():
    into = {"a": Sum(1.0)}
    assert merge_all(into, {"a": Sum(2.0), "b": Max(5.0)}) is into
    assert into == {"a": Sum(3.0), "b": Max(5.0)}


def test_an_unknown_name_lists_the_closest_and_all():
    shapes: Registry[int] = Registry("shape")
    shapes.register("square", 4)
    shapes.register("triangle", 3)
    with pytest.raises(ValueError, match=r"unknown shape 'sqare'; did you mean 'square'\? Known: square, triangle\."):
        shapes["sqare"]
    with pytest.raises(ValueError, match=r"unknown shape 'xyz'; Known: square, triangle\."):
        shapes["xyz"]


def test_a_name_is_given_once():
    shapes: Registry[object] = Registry("shape")
    circle = object()
    assert shapes.register("circle", circle) is circle
    shapes.register("circle", circle)
    with pytest.raises(ValueError, match="already registered"):
        shapes.register("circle", object())
    assert shapes["circle"] is circle
