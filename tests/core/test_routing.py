"""Routes are read from routers and forced on them: the model's own code does the rest, so gradients are exact."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from covey.core.findings import CheckError
from covey.core.routes import RouteShape
from covey.core.routing import Routing, check_routing, routing_of
from tests.support import mixtures, tiny
from tests.support.exact import KeepFloat64


@pytest.fixture
def wide():
    with KeepFloat64():
        yield


H, C, E, K, T = 6, 5, 8, 3, 11  # hidden units, channels of an expert, experts, experts of a token, tokens
COMMON = {"hidden_size": H, "num_experts_per_tok": K}


def chosen_softmax(logits, ids, router):
    """A softmax over the chosen experts, which is one over all, made to add up to 1."""
    return logits[ids].softmax(0)


def of_all(logits, ids, router):
    """A softmax over all experts."""
    return logits.softmax(0)[ids]


def sigmoid_scaled(logits, ids, router):
    """Sigmoids that add up to the scale; the bias that corrects the choice plays no part."""
    weights = logits.sigmoid()[ids]
    return weights / (weights.sum() + 1e-20) * router.routed_scaling_factor


def swiglu(experts, x, expert):
    gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
    return experts.down_proj[expert] @ (nn.functional.silu(gate) * up)


def clamped(experts, x, expert):
    """gpt-oss: interleaved, clamped, with biases."""
    both = x @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[::2].clamp(max=experts.limit), both[1::2].clamp(-experts.limit, experts.limit)
    return ((up + 1) * gate * torch.sigmoid(gate * experts.alpha)) @ experts.down_proj[expert] + experts.down_proj_bias[
        expert
    ]


BLOCKS = {
    "Mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(**COMMON, num_local_experts=E, intermediate_size=C),
        chosen_softmax,
        swiglu,
    ),
    "Qwen2-MoE": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(
            **COMMON, num_experts=E, moe_intermediate_size=C, shared_expert_intermediate_size=7, norm_topk_prob=False
        ),
        of_all,
        swiglu,
    ),
    "Qwen3-MoE": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**COMMON, num_experts=E, moe_intermediate_size=C, norm_topk_prob=True),
        chosen_softmax,
        swiglu,
    ),
    "OLMoE": (
        OlmoeSparseMoeBlock,
        OlmoeConfig(**COMMON, num_experts=E, intermediate_size=C, norm_topk_prob=False),
        of_all,
        swiglu,
    ),
    "DeepSeek-V3": (
        DeepseekV3MoE,
        DeepseekV3Config(
            **COMMON,
            n_routed_experts=E,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=C,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        ),
        sigmoid_scaled,
        swiglu,
    ),
    "gpt-oss": (
        GptOssMLP,
        GptOssConfig(**COMMON, num_local_experts=E, intermediate_size=C),
        chosen_softmax,
        clamped,
    ),
}


def block_of(name):
    """A layer in float64 with weights at random, the routing of its router, and its formulas."""
    kind, config, gate, expert = BLOCKS[name]
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    block = kind(config).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
        if hasattr(getattr(block, "gate", None), "e_score_correction_bias"):
            block.gate.e_score_correction_bias.normal_()
    router = block.gate if hasattr(block, "gate") else block.router
    return block, router, Routing(RouteShape((0,), 1, E, K), [router]), gate, expert


def output(block, x):
    result = block(x[None])
    return (result[0] if isinstance(result, tuple) else result)[0]


def by_hand(block, router, gate, expert, x, ids):
    """One token and one expert after the other; shared experts as the layer has them."""
    rows = []
    for token, chosen in zip(x, ids, strict=True):
        logits = router.weight @ token + (getattr(router, "bias", None) if hasattr(router, "bias") else 0.0)
        weights = gate(logits, chosen, router)
        row = sum(weight * expert(block.experts, token, one) for weight, one in zip(weights, chosen, strict=True))
        if hasattr(block, "shared_experts"):
            row = row + block.shared_experts(token)
        if hasattr(block, "shared_expert"):
            row = row + torch.sigmoid(block.shared_expert_gate(token)) * block.shared_expert(token)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_and_gradients_are_those_of_a_loop_with_fixed_experts(name):
    block, router, routing, gate, expert = block_of(name)
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=chance, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(T, H, generator=chance, dtype=torch.float64)
    ids = torch.stack([torch.randperm(E, generator=chance)[:K] for _ in range(T)])
    with routing.passing(ids[:, None].to(torch.uint8)) as read:
        ours = output(block, x)
    assert torch.equal(read.taken[:, 0].long(), ids)
    theirs = by_hand(block, router, gate, expert, x, ids)
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    weights = [x, *block.parameters()]
    found, expected = (torch.autograd.grad((y * cotangent).sum(), weights, allow_unused=True) for y in (ours, theirs))
    assert found[0] is not None and any(one is not None and one.any() for one in found[1:])
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_router_that_gets_its_own_choice_does_what_it_did(name):
    block, router, routing, *_ = block_of(name)
    x = torch.randn(T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    free = output(block, x)
    chosen = router(x)[2]
    with routing.passing() as read:
        assert torch.equal(output(block, x), free)
    assert torch.equal(read.taken[:, 0].long(), chosen)
    with routing.passing(read.taken) as again:
        assert torch.equal(output(block, x), free)
    assert (again.replaced.tolist(), again.forced.item()) == ([0], T)


def test_tokens_without_a_route_choose_themselves():
    block, router, routing, *_ = block_of("Mixtral")
    x = torch.randn(T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = router(x)[2]
    given = torch.full((T, 1, K), 255, dtype=torch.uint8)
    given[3] = torch.tensor([e for e in range(E) if e not in own[3].tolist()][:K], dtype=torch.uint8)
    with routing.passing(given) as read:
        output(block, x)
    assert torch.equal(read.taken[3, 0], given[3, 0])
    others = [token for token in range(T) if token != 3]
    assert torch.equal(read.taken[others, 0].long(), own[others])
    assert (read.replaced.tolist(), read.forced.item()) == ([1], 1)


def test_a_pass_over_other_tokens_is_refused():
    block, _, routing, *_ = block_of("Mixtral")
    with (
        pytest.raises(RuntimeError, match=f"routes of 2 tokens .* pass over {T}"),
        routing.passing(torch.zeros(2, 1, K, dtype=torch.uint8)),
    ):
        output(block, torch.zeros(T, H, dtype=torch.float64))


def test_a_router_that_is_not_called_is_an_error():
    _, _, routing, *_ = block_of("Mixtral")
    with pytest.raises(CheckError) as caught, routing.passing():
        pass
    assert caught.value.codes == ["model-routes"]


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mixtures.SETTINGS)
def test_the_routers_of_a_model_are_found_in_order(name):
    model = mixtures.model(name)
    shape = routing_of(model).shape
    dense = 1 if name == "DeepseekV3" else 0
    assert shape.layers == tuple(range(dense, model.config.num_hidden_layers))
    assert (shape.experts, shape.top_k) == (8 if name == "DeepseekV3" else 4, 2)
    assert routing_of(model) is routing_of(model)


def test_models_without_known_routers_are_refused_with_advice():
    with pytest.raises(CheckError) as caught:
        check_routing(tiny.model(), "routing_replay='R3'")
    assert caught.value.codes == ["model-routes"]
    model = mixtures.model("Mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = type("OtherRouter", (nn.Module,), {})
    with pytest.raises(CheckError, match="OtherRouter") as caught:
        check_routing(model, "routing_replay='R3'")
    assert caught.value.codes == ["model-routes"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_get_the_same_routes(reentrant):
    model = mixtures.model("Mixtral").train()
    routing = routing_of(model)
    ids = torch.arange(4, 14)[None]
    chance = torch.Generator().manual_seed(0)
    given = torch.stack([torch.randperm(4, generator=chance)[:2] for _ in range(20)]).view(10, 2, 2).to(torch.uint8)

    def gradients():
        model.zero_grad()
        with routing.passing(given, writes=False):
            loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad(), routing.passing():  # another pass in between
            model(input_ids=ids[:, :3])
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_copy_of_a_model_has_routers_of_its_own():
    model = mixtures.model("Mixtral")
    ids = torch.arange(4, 14)[None]
    with torch.no_grad(), routing_of(model).passing():
        model(input_ids=ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
        with routing_of(other).passing() as read:
            other(input_ids=ids)
        with routing_of(model).passing() as own:
            model(input_ids=ids)
    assert routing_of(other).routers[0] is other.model.layers[0].mlp.gate
    assert not torch.equal(read.taken, own.taken)
