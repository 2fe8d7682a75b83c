"""Weights and inputs in fewer bits: bounds of their errors, products of rounded numbers, and what is not rounded."""

import asyncio
import copy
import time

import pytest
import torch
from torch import nn

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native import engine as native
from covey.engines.native import number_formats
from covey.engines.native.engine import NativeEngine
from covey.engines.native.number_formats import (
    FORMATS,
    INT_MM_ROWS,
    Bfloat16Onednn,
    FloatProduct,
    Int8Gpu,
    Int8Onednn,
    RoundedKernel,
    fast_product,
)
from covey.engines.native.packed_weights import packed_linears, roundable
from covey.engines.native.recurrent_engine import RecurrentEngine
from tests.support import hybrids, tiny


def restored(x, name):
    """The numbers that rounded rows stand for."""
    values, scales = FORMATS[name].rounded(x)
    return values.float() if scales is None else values.float() * scales


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_int8_is_a_grid_of_127_steps_up_to_the_largest_number_of_a_row():
    values, scales = FORMATS["int8"].rounded(torch.tensor([[127.0, -63.6, 0.4, 0.0], [0.5, -1.0, 0.25, 0.0]]))
    assert values.tolist() == [[127, -64, 0, 0], [64, -127, 32, 0]]  # 63.5 is rounded to 64, 31.75 to 32
    torch.testing.assert_close(scales, torch.tensor([[1.0], [1 / 127]]))


def test_float8_keeps_three_bits_after_the_first():
    values, scales = FORMATS["float8"].rounded(torch.tensor([[448.0, 17.0, -1.0625, 0.0]]))
    assert scales.tolist() == [[1.0]]
    assert values.float().tolist() == [[448.0, 16.0, -1.0, 0.0]]  # between 16 and 18, and between 1 and 1.125


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("int8", lambda x: x.abs().amax(-1, keepdim=True) / 254),  # half a step
        ("float8", lambda x: x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 1024),  # half of 2^-3; subnormal
        ("bfloat16", lambda x: x.abs() / 256),  # half of 2^-7
    ],
)
def test_errors_are_bounded(name, bound):
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    error = (restored(x, name) - x).abs()
    assert (error <= bound(x) * (1 + 1e-5)).all() and error.max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_rounded_as_it_is_alone(name):
    x = torch.randn(7, 33) * torch.logspace(-20, 20, 7)[:, None]
    for row, alone in zip(restored(x, name), x, strict=True):
        assert torch.equal(row, restored(alone[None], name)[0])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_a_row_with_nan_is_seen(name):
    x = torch.zeros(3, 8)
    x[1], x[2, 3] = 1.0, float("nan")
    kernel = RoundedKernel(name, torch.eye(8), None)
    found = kernel(x)
    assert found[0].eq(0).all() and found[2].isnan().any()
    torch.testing.assert_close(found[1], x[1])


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_numbers_that_rounded_ones_stand_for(name, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96), torch.randn(9, 96)
    added = torch.randn(48) if bias else None
    expected = nn.functional.linear(restored(x, name), restored(weight, name), added)
    tolerance = 0.02 if name == "bfloat16" else 1e-4  # a processor that multiplies bfloat16 rounds results to it
    torch.testing.assert_close(RoundedKernel(name, weight, added)(x), expected, atol=tolerance, rtol=tolerance)


def test_products_of_int8_are_exact():
    """Sums of whole numbers below 2^24: with 1,000 columns of at most 127 * 127."""
    x, weight = torch.randn(5, 1000), torch.randn(16, 1000)
    (values, scales), (weights, others) = (FORMATS["int8"].rounded(matrix) for matrix in (x, weight))
    sums = (values.double() @ weights.double().T).float()
    assert torch.equal(RoundedKernel("int8", weight, None)(x), sums * others.view(1, -1) * scales)


@pytest.mark.parametrize("rows", [1, 5, INT_MM_ROWS, INT_MM_ROWS + 3])
def test_the_integer_product_of_gpus_fills_rows_up(rows):
    # Weights up to 63: processors with AVX2 alone add two products in 16 bits, and (127 + 128) * 63 * 2 < 2**15.
    values, weights = (torch.randint(-most, most + 1, (n, 32), dtype=torch.int8) for n, most in ((rows, 127), (24, 63)))
    assert torch.equal(Int8Gpu(weights, None)(values, None), (values.double() @ weights.double().T).float())


def test_a_fast_product_that_is_wrong_is_not_taken(monkeypatch):
    """As on a processor whose sums of int8 products stop at 16 bits."""

    class Saturated(FloatProduct):
        def __call__(self, values, scales):
            return super().__call__(values, scales).clamp(min=-32768)

    class Missing(FloatProduct):
        def __init__(self, weight, scales):
            raise NotImplementedError

    class Right(FloatProduct):
        name = "right"

    for kind, taken in ((Saturated, None), (Missing, None), (Right, Right)):
        monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: True, kind))
        assert fast_product("cpu", "int8") is taken
    assert RoundedKernel("int8", torch.randn(4, 4), None).name.startswith("int8, right")
    monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: False, Right))
    assert fast_product("cpu", "int8") is None
    assert fast_product("cpu", "float8") is None  # there is none


def test_onednns_product_of_int8_is_exact_where_it_is_taken():
    if fast_product("cpu", "int8") is None:
        pytest.skip("no fast product of int8 on this processor")
    values, weights = (torch.randint(-127, 128, (n, 576), dtype=torch.int8) for n in (9, 64))
    assert torch.equal(Int8Onednn(weights, None)(values, None), (values.double() @ weights.double().T).float())


# ---- models ----------------------------------------------------------------------------------------------------------


class Rounded(nn.Module):
    """A linear layer of torch with the numbers that rounded weights stand for, of inputs that are rounded."""

    def __init__(self, layer, name):
        super().__init__()
        self.name, self.weight, self.bias = name, restored(layer.weight.detach(), name), layer.bias
        self.rounds_results = fast_product("cpu", name) is Bfloat16Onednn  # some processors do

    def forward(self, x):
        rounded = restored(x.reshape(-1, x.shape[-1]), self.name).view(x.shape)
        product = nn.functional.linear(rounded, self.weight, self.bias)
        return product.bfloat16().float() if self.rounds_results else product


def plain_copy(model, name):
    """A copy of the model whose linear layers are such."""
    copied = copy.deepcopy(model)
    for parent in list(copied.modules()):
        for child, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, child, Rounded(layer, name))
    return copied


def sampled(model, dtype, prompt=(5, 9, 2), n=4, tokens=12):
    engine = NativeEngine(lambda: model, eos_token_ids=set(), pad_token_id=0, dtype=dtype)
    request = SampleRequest(list(prompt), n, SamplingParams(tokens), list(range(n)))
    with torch.no_grad(), engine.awake():
        return asyncio.run(engine.generate(request))


def scored(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
    places = range(len(prompt) - 1, ids.shape[1] - 1)
    return torch.stack([logprobs[place, ids[0, place + 1]] for place in places])


@pytest.mark.parametrize("products", ["of every processor", "of this one"])
@pytest.mark.parametrize("name", FORMATS)
def test_log_probs_are_those_of_a_plain_model_with_the_rounded_numbers(name, products, monkeypatch):
    if products == "of every processor":
        monkeypatch.setattr(number_formats, "FAST", {})
    elif fast_product("cpu", name) is None:
        pytest.skip("this processor has no fast product of the format")
    model = tiny.model()
    plain, prompt = plain_copy(model, name), (5, 9, 2)
    found = sampled(model, name, prompt)
    reported = torch.cat([torch.tensor(one.logprobs) for one in found])
    of_plain, of_model = (torch.cat([scored(each, prompt, one) for one in found]) for each in (plain, model))
    same, rounding = (reported - of_plain).abs().mean(), (reported - of_model).abs().mean()
    assert rounding > 1e-3  # what is corrected
    assert same < rounding / 10  # rounding of sums moves some inputs to the next number


def test_rounded_samples_differ_and_the_model_stays_as_it_is():
    model = tiny.model()
    before = copy.deepcopy(model.state_dict())
    exact, rounded = sampled(model, None), sampled(model, "int8")
    assert [one.logprobs for one in exact] != [one.logprobs for one in rounded]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert [one.logprobs for one in sampled(model, None)] == [one.logprobs for one in exact]


def test_models_with_a_state_are_rounded():
    model = hybrids.model(next(iter(hybrids.SETTINGS)))
    found = []
    for dtype in (None, "int8"):
        engine = RecurrentEngine(lambda: model, eos_token_ids=set(), dtype=dtype)
        with torch.no_grad(), engine.awake():
            found.append(asyncio.run(engine.generate(SampleRequest([5, 9, 2], 1, SamplingParams(4), [0])))[0].logprobs)
    assert found[0] != found[1]


def test_changed_weights_are_rounded_again():
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(2):
            expected = nn.functional.linear(restored(x, "int8"), restored(layer.weight, "int8"), layer.bias)
            with packed_linears(layer, "int8"):
                torch.testing.assert_close(layer(x), expected)
            layer.weight.mul_(3).add_(1)


def test_the_fused_step_rounds_too(monkeypatch):
    taken = []
    call = native.FusedStep.__call__
    monkeypatch.setattr(native.FusedStep, "__call__", lambda *args: taken.append(1) or call(*args))
    sampled(tiny.model(), "int8")
    assert len(taken) > 10


def test_two_ways_of_computing_are_compared_without_rounding():
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad(), packed_linears(layer, "int8") as packed:
        rounded = layer(x)
        with packed.unrounded():
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(x), rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_have_the_dtype_of_inputs(dtype):
    layer = nn.Linear(8, 8).to(dtype)
    with torch.no_grad(), packed_linears(layer, "int8"):
        assert layer(torch.randn(2, 3, 8, dtype=dtype)).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(2, 3, 8, dtype=dtype)).dtype == torch.bfloat16


def test_adapters_and_routers_are_not_rounded():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module in roundable(model)}
    assert names == {"base_layer", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"}
    router = nn.Linear(32, 4)
    model = tiny.model()
    model.model.layers[0].router, model.config.num_local_experts = router, 4
    assert router not in roundable(model) and model.lm_head in roundable(model)


def test_an_adapter_adds_what_it_adds_to_rounded_weights():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.model(), config).eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 32)
    low = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
    expected = nn.functional.linear(restored(x, "int8"), restored(layer.base_layer.weight, "int8")) + low
    with torch.no_grad(), packed_linears(model, "int8"):
        torch.testing.assert_close(layer(x), expected)


def test_a_tied_head_is_rounded_and_the_embedding_is_not():
    model = tiny.model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    x, tokens = torch.randn(2, 32), torch.tensor([3, 4])
    with torch.no_grad(), packed_linears(model, "int8"):
        torch.testing.assert_close(
            model.lm_head(x), nn.functional.linear(restored(x, "int8"), restored(model.lm_head.weight, "int8"))
        )
        assert torch.equal(model.model.embed_tokens(tokens), model.lm_head.weight[tokens])


@pytest.fixture(params=["mkl", "onednn", "none"])
def library(request, monkeypatch):
    monkeypatch.setattr(number_formats, "onednn_is_faster", lambda few_rows: request.param == "onednn")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: request.param != "none")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_among_any_others(name):
    layer = nn.Linear(96, 40)
    x = torch.randn(70, 96)
    with torch.no_grad(), packed_linears(layer, name):
        whole = layer(x)
        for rows in (1, 2, 3, 4, 5, 17, 64):
            assert torch.equal(layer(x[-rows:]), whole[-rows:])


class Plodding(FloatProduct):
    """A product that is right and takes longer than any loop may."""

    name = "plodding"

    def __call__(self, values, scales):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return super().__call__(values, scales)


class Quick(FloatProduct):
    name = "quick"


@pytest.mark.parametrize(("kind", "used"), [(Quick, True), (Plodding, False)])
def test_a_product_that_takes_many_times_as_long_as_float32_is_not_used(monkeypatch, kind, used):
    monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: True, kind))
    before = torch.get_rng_state()
    assert (number_formats.fast_product("cpu", "int8") is kind) == used
    assert torch.equal(torch.get_rng_state(), before)
