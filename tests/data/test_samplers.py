"""Samplers: chances of rows from the rewards that they have earned, and orders of a column."""

import math

import pytest
import torch

from covey.config.choosing import check_sampler
from covey.core.findings import CheckError
from covey.data.samplers import PromptFacts, PromptHistory, PromptStream, order_of, sampler_of

POOLS = {"pools": {"hard": [0.25, 0.2], "normal": [0.75, 1.0], "easy": [None, 0.4]}}


def facts(*means):
    values = torch.tensor(means, dtype=torch.float64)
    return PromptFacts(values, values.square(), (~values.isnan()).long(), 0)


def test_pools_by_a_table():
    # largest weight 1: hard up to 1/4 has .2, normal up to 3/4 has 1, easy .4; rows not seen yet 1
    chances = sampler_of(POOLS, 0.1)(facts(0.0, 0.25, 0.3, 0.75, 0.8, 1.0, math.nan))
    assert chances.tolist() == [0.2, 0.2, 1.0, 1.0, 0.4, 0.4, 1.0]


def test_weights_of_pools_are_relative():
    doubled = {"pools": {name: [top, 2 * weight] for name, (top, weight) in POOLS["pools"].items()}}
    given = facts(0.1, 0.5, 0.9)
    assert torch.equal(sampler_of(POOLS, 0.1)(given), sampler_of(doubled, 0.1)(given))


def test_a_function_is_given_what_is_known():
    def often(means, squares, counts, step):
        return torch.where(counts > 0, 0.5, 1.0) - 0.1 * step

    known = PromptHistory(3, sampler_of(often, 0.1))
    known.update([1], torch.tensor([[0.0, 1.0]]), torch.tensor([math.nan]))
    assert known.chances.tolist() == [1.0, 0.5, 1.0]
    known.at_step(2)
    assert known.chances.tolist() == pytest.approx([0.8, 0.3, 0.8])


@pytest.mark.parametrize("chances", [[1.0, 0.0], [1.0, 1.5], [1.0, math.nan], [1.0]])
def test_chances_that_cannot_be_are_refused(chances):
    with pytest.raises(ValueError, match="sampler"):
        sampler_of(lambda *known: chances, 0.1)(facts(0.0, 0.0))


def test_an_order_goes_from_the_smallest_to_the_largest_in_every_epoch():
    rows = [{"level": 3}, {"level": 1}, {"level": 2}]
    order = order_of({"order": "level"}, rows, "train_dataset")
    stream = PromptStream(3, seed=0, name="prompts", shuffle=True, order=order)
    assert stream.take(3) == stream.take(3) == [1, 2, 0]
    assert order_of("uniform", rows, "") is None


@pytest.mark.parametrize("rows", [[{"level": 1}, {}], [{"level": 1}, {"level": "a"}]])
def test_an_order_needs_comparable_values(rows):
    with pytest.raises(CheckError) as raised:
        order_of({"order": "level"}, rows, "train_dataset")
    assert raised.value.codes == ["column-order"]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("difficult", "setting-word"),
        ({"pool": {}}, "setting-word"),
        ({"order": 3}, "setting-type"),
        ({"pools": {}}, "setting-type"),
        ({"pools": {"hard": 1}}, "setting-type"),
        ({"pools": {"hard": [0.5, 1.0]}}, "setting-range"),  # nothing for means above 1/2
        ({"pools": {"a": [0.5, 1.0], "b": [0.25, 1.0], "c": [None, 1.0]}}, "setting-range"),
        ({"pools": {"all": [None, 0.0]}}, "setting-range"),
        (3, "setting-word"),
    ],
)
def test_samplers_that_cannot_work(given, code):
    assert [one.code for one in check_sampler(given)] == [code]


@pytest.mark.parametrize("given", ["uniform", "difficulty", "file.py:f", POOLS, {"order": "level"}])
def test_samplers_that_can(given):
    assert not list(check_sampler(given))
