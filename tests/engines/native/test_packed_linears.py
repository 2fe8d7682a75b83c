"""Packed weights: the same products, for a while."""

import pytest
import torch
from torch import nn

from covey.engines.native import packed_weights
from covey.engines.native.invariance import LARGEST
from covey.engines.native.packed_weights import packed_linears


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    monkeypatch.setattr(packed_weights, "LARGE_MODEL", 0)
    monkeypatch.setattr(packed_weights, "onednn_is_faster", lambda few_rows: request.param == "onednn")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (33, 7), (1, 5), (64, 104), (576, 192)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_torchs_for_any_row_count(inputs, outputs, bias):
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad(), packed_linears(layer):
        for rows in [*range(1, 20), 31, 63, 64, 65, 130, LARGEST, LARGEST + 1]:
            x = torch.randn(rows, 1, inputs)
            assert layer(x).shape == (rows, 1, outputs)
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert layer(torch.randn(0, inputs)).shape == (0, outputs)


@pytest.mark.usefixtures("library")
def test_changed_weights_are_packed_again():
    layer = nn.Linear(8, 8)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(2):
            with packed_linears(layer):
                torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
            layer.weight.mul_(3)


@pytest.mark.usefixtures("library")
def test_widths_are_those_of_the_weights():
    layer = nn.Linear(8, 5)
    layer.in_features, layer.out_features = 5, 8  # as PEFT declares a head that it ties to trained embeddings
    x = torch.randn(3, 8)
    with torch.no_grad(), packed_linears(layer):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(input=x), layer(x))


def test_modules_are_restored_after_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ZeroDivisionError), packed_linears(model):
        assert "forward" in vars(model[0])
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_only_plain_float32_linears_are_patched():
    class Special(nn.Linear):
        pass

    wrapped = nn.Linear(4, 4)
    wrapped.forward = lambda x: x
    model = nn.ModuleList([Special(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16(), wrapped])
    before = [vars(module).get("forward") for module in model]
    with packed_linears(model):
        assert [vars(module).get("forward") for module in model] == before
    assert [vars(module).get("forward") for module in model] == before
