"""Fused norms and MLPs: the values and gradients of the modules, and less that is kept."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy import products
from covey.policy.fused import find_fused_layers, fused_layers
from covey.policy.scoring import TokenScorer

TINY = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
PLAIN = [LlamaConfig(**TINY), Qwen2Config(**TINY), Qwen3Config(**TINY)]


def model_of(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def gradients(model, layout, checkpointing, layers):
    rollouts = [
        Rollout([5, 6, 7], list(range(start, start + size)), [True] * size, None, "", FinishReason.STOP)
        for start, size in ((10, 5), (30, 2), (50, 9))
    ]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    with fused_layers(layers):
        scores = TokenScorer(lambda m: m, temperature=1.0, layout=layout)(model, collate(rollouts), entropy=True)
        (scores.logprobs * torch.arange(16)).sum().backward()
    return [scores.logprobs, scores.entropies, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.model_type)
@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_modules(config, layout, checkpointing):
    model = model_of(config)
    layers = find_fused_layers(model)
    norms = 2 * 2 + 1 + (4 if config.model_type == "qwen3" else 0)
    assert len(layers) == norms + 2
    for ours, theirs in zip(
        gradients(model, layout, checkpointing, layers), gradients(model, layout, checkpointing, []), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
def test_gradients_are_the_same_with_products_by_onednn(monkeypatch):
    model = model_of(PLAIN[0], torch.float32)
    layers = find_fused_layers(model)
    monkeypatch.setattr(products, "LARGE_PRODUCT", 0)
    found = {}
    for faster in (False, True):
        monkeypatch.setattr(products, "onednn_is_faster", lambda faster=faster: faster)
        with torch.profiler.profile() as profile:
            found[faster] = gradients(model, "shared_prefix", False, layers)
        assert any("_linear_pointwise" in event.key for event in profile.key_averages()) == faster
    for ours, theirs in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


class Unweighted(nn.Module):
    """Like the norms of Gemma 4 and NanoChat: one without a weight, and one whose weight is None."""

    def __init__(self):
        super().__init__()
        self.without = type("SomeRMSNorm", (nn.Module,), {"eps": 1e-6})()
        self.none = nn.RMSNorm(4, eps=1e-6, elementwise_affine=False)


def test_norms_without_a_weight_are_left_alone():
    assert find_fused_layers(Unweighted()) == []


@pytest.mark.parametrize("name", ["gemma4_text", "nanochat", "llama4_text"])
def test_models_with_other_norms_and_sums_are_trained(name):
    """Gemma 4 and NanoChat have norms without a weight; Llama 4 adds to the output of an MLP in place."""
    settings = {**TINY, "pad_token_id": 0, "num_local_experts": 2, "hidden_size_per_layer_input": 8}
    if name == "gemma4_text":
        settings |= {"vocab_size_per_layer_input": 100, "layer_types": ["sliding_attention", "full_attention"]}
        settings |= {"global_head_dim": 4, "num_kv_shared_layers": 0, "sliding_window": 8}
    model = model_of(AutoConfig.for_model(name, **settings), torch.float32)
    ours, theirs = (gradients(model, "padded", False, found) for found in (find_fused_layers(model), []))
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_weights_that_are_frozen_get_no_gradient():
    model = model_of(PLAIN[0])
    layers = find_fused_layers(model)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    ours, theirs = (gradients(model, "packed", False, some) for some in (layers, []))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


def test_other_modules_are_left_alone():
    assert find_fused_layers(model_of(Gemma2Config(**TINY))) == []  # 1 + weight, and GELU
    assert find_fused_layers(model_of(PLAIN[0], torch.bfloat16)) == []
    model = model_of(PLAIN[0])
    model.model.norm.register_forward_hook(lambda *_: None)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    found = [layer.module for layer in find_fused_layers(model)]
    assert model.model.norm not in found
    assert model.model.layers[0].mlp not in found
    assert model.model.layers[1].mlp in found
    model.model.layers[0].mlp.act_fn = nn.GELU()
    model.model.layers[0].mlp.up_proj._forward_hooks.clear()
    found = [layer.module for layer in find_fused_layers(model)]
    assert model.model.layers[0].mlp not in found
    assert model.model.layers[1].mlp in found
