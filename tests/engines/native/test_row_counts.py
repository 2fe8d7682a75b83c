"""Row counts at which a row has the same bits, found by measuring products of processors that are imitated."""

import pytest
import torch

from covey.engines.native import invariance
from covey.engines.native.invariance import RowCounts, elementwise

ROW = torch.arange(1.0, 9.0)[None]


def product(differs):
    """Sums of rows, which one rounding moves wherever `differs(rows, place)` says so; counts its calls."""

    def kernel(x):
        kernel.rows.append(len(x))
        y = x.cumsum(-1)
        for place in range(len(x)):
            if differs(len(x), place):
                y[place] = torch.nextafter(y[place], y[place] + 1)
        return y

    kernel.rows = []
    return kernel


def results_of(kernel, count):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return x, RowCounts(ROW, kernel).apply(kernel, x)


KINDS = {
    "equal everywhere": (lambda rows, place: False, {1: [(1, 1)], 7: [(7, 7)], 64: [(64, 64)]}),
    "other bits below 4 rows": (lambda rows, place: rows < 4, {1: [(1, 4)], 3: [(3, 4)], 5: [(5, 5)]}),
    "other bits below 17 rows": (lambda rows, place: rows < 17, {2: [(2, 17)], 20: [(20, 20)]}),
    "odd counts are cut unevenly": (lambda rows, place: rows % 2 and place == rows - 1, {1: [(1, 2)], 9: [(9, 10)]}),
    "another kernel above 64": (lambda rows, place: rows > 64, {64: [(64, 64)], 70: [(64, 64), (6, 6)]}),
    "another kernel from 100 on": (lambda rows, place: rows >= 100, {99: [(64, 64), (35, 35)], 90: [(90, 92)]}),
    "places differ at 64 rows": (lambda rows, place: rows > 32 and place % 2, {33: [(16, 16), (16, 16), (1, 1)]}),
    "places always differ": (lambda rows, place: place > 0, {3: [(1, 1), (1, 1), (1, 1)]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_computed_where_they_are_equal(kind):
    differs, expected = KINDS[kind]
    for rows, pieces in expected.items():
        assert RowCounts(ROW, product(differs)).pieces(rows, product(differs)) == tuple(pieces)
    for rows in (1, 2, 3, 5, 16, 31, 63, 64, 65, 99, 101, 255, 256, 257, 600):
        x, y = results_of(product(differs), rows)
        for place in {0, rows // 2, rows - 1}:
            alone = RowCounts(ROW, product(differs)).apply(product(differs), x[place : place + 1])
            assert torch.equal(y[place], alone[0]), (rows, place)


def test_each_count_is_measured_once():
    kernel = product(lambda rows, place: rows < 4)
    counts = RowCounts(ROW, kernel)
    counts.pieces(2, kernel)
    measured = len(kernel.rows)
    for _ in range(3):
        counts.apply(kernel, ROW.repeat(2, 1))
    assert kernel.rows[measured:] == [4, 4, 4]


def test_zeros_say_nothing_about_other_weights(monkeypatch):
    monkeypatch.setattr(invariance, "measured", invariance.Measured())
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    assert not invariance.linear(x, torch.zeros(8, 16)).any()
    assert not invariance.row_counts("zeros", lambda rows: rows * 0.0, 16, torch.float32).informative
    assert invariance.measured._known == {}
    invariance.linear(x, torch.randn(8, 16))
    assert len(invariance.measured._known) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_same_product(bias):
    layer = torch.nn.Linear(24, 40, bias=bias)
    with torch.no_grad():
        for rows in (1, 3, 64, 300):
            x = torch.randn(rows, 2, 24)
            torch.testing.assert_close(invariance.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_that_are_left_over_are_computed_as_the_others(threads):
    def kernel(x):
        """Whole vectors of a thread's share, and the rest, by functions that round differently."""
        shares = min(threads, -(-x.numel() // invariance.GRAIN))
        parts = x.split(-(-x.numel() // shares))
        return torch.cat([torch.cat([p[: len(p) // 16 * 16], p[len(p) // 16 * 16 :] * 2]) for p in parts])

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (1, 15, 16, 17, 1000, 32769, 70001, 100003):
            assert torch.equal(elementwise(kernel, torch.ones(count)), torch.ones(count))
    finally:
        torch.set_num_threads(before)


def test_functions_of_a_mode_are_replaced():
    x = torch.randn(5, 3, 7)

    def computed():
        weights = torch.addmm(x[0, 0], x[0], x[1].mT @ x[2])
        return torch.nn.functional.silu(x), x @ x.mT, torch.matmul(x, x[0].T), x.exp(), weights

    with invariance.InvariantFunctions():
        found = computed()
    torch.testing.assert_close(found, computed())


def test_operands_may_be_named():
    x, y, z = torch.randn(5, 3, 7), torch.randn(4, 7), torch.randn(4)
    functional = torch.nn.functional

    def computed():
        return (
            functional.linear(input=x, weight=y),
            functional.linear(bias=z, weight=y, input=x),
            functional.silu(input=x),
            torch.matmul(input=x, other=y.T),
            torch.bmm(x, mat2=x.mT),
            torch.addmm(z, mat2=y.T, mat1=x[0]),
            torch.addmm(input=z, mat1=x[0], mat2=y.T, beta=2),
        )

    with invariance.InvariantFunctions():
        found = computed()
    torch.testing.assert_close(found, computed())
