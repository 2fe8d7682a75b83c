"""A decoding step in few operations: it computes what the model does, and leaves alone what it does not know."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from covey.engines.native import engine as native
from covey.engines.native import invariance, packed_weights
from tests.engines.native.test_native_engine import engine_of, sample
from tests.support import trials

SIZES = {
    **{"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
KNOWN = {
    "llama": LlamaConfig(**SIZES),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, narrow heads": LlamaConfig(**SIZES, head_dim=6, rms_norm_eps=0.1, hidden_act="gelu"),
    "llama, tied, yarn": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=YARN),
    "mistral, window of 4": MistralConfig(**SIZES, head_dim=8, sliding_window=4),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
OTHERS = {
    "granite, multipliers": GraniteConfig(**SIZES, embedding_multiplier=2.0, residual_multiplier=0.5),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "olmo2": Olmo2Config(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "smollm3, layers without rotation": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
}


def random_model(config):
    """Weights large enough for a distribution that depends on them, and no norm or bias at its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


def steps_of(model, monkeypatch, **settings):
    """Samples, and the number of fused steps that they took."""
    taken = []
    call = native.FusedStep.__call__
    monkeypatch.setattr(native.FusedStep, "__call__", lambda *args: taken.append(1) or call(*args))
    engine = engine_of(model, **settings)
    return sample(engine), len(taken)


@pytest.fixture(params=["mkl", "onednn"])
def library(request, monkeypatch):
    monkeypatch.setattr(packed_weights, "LARGE_MODEL", 0)
    monkeypatch.setattr(packed_weights, "onednn_is_faster", lambda few_rows: request.param == "onednn")


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", KNOWN)
def test_it_computes_what_the_model_does(name, monkeypatch):
    model = random_model(KNOWN[name])
    fused, steps = steps_of(model, monkeypatch, max_sequences=8)
    assert steps > 20
    monkeypatch.setattr(native, "find_fused_step", lambda model: None)
    plain, _ = steps_of(model, monkeypatch, max_sequences=8)
    for ours, theirs in zip(fused, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_take_their_own_steps(name, monkeypatch):
    model = random_model(OTHERS[name])
    engine = engine_of(model)
    sample(engine)
    assert not engine._fuses


def test_one_trial_is_of_shared_prompts_and_of_fused_steps(monkeypatch):
    monkeypatch.setattr(trials, "_known", {})
    passes, forward = [], LlamaModel.forward
    monkeypatch.setattr(
        LlamaModel, "forward", functools.wraps(forward)(lambda *a, **kw: passes.append(1) or forward(*a, **kw))
    )
    engine = engine_of(random_model(KNOWN["llama"]))
    sample(engine)
    first = len(passes)
    sample(engine)
    assert engine._fuses and engine._shares_prefixes
    assert first - (len(passes) - first) == 2  # of all tokens, and of the prompt; steps are fused


def test_hooks_see_every_step(monkeypatch):
    model = random_model(KNOWN["llama"])
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(1))
    _, steps = steps_of(model, monkeypatch)
    assert not steps
    assert len(seen) > 12


@pytest.mark.slow
def test_patched_and_adapted_layers_take_their_own_steps(monkeypatch):
    from peft import LoraConfig, get_peft_model

    patched = random_model(KNOWN["llama"])
    patched.model.layers[0].mlp.forward = lambda x: x
    adapted = get_peft_model(random_model(KNOWN["llama"]), LoraConfig(target_modules=["q_proj"]))
    half = random_model(KNOWN["llama"]).bfloat16()
    for model in (patched, adapted, half):
        assert steps_of(model, monkeypatch)[1] == 0


def test_threads_and_weights_are_as_before_when_it_sleeps(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found = []
    find = native.find_fused_step
    monkeypatch.setattr(native, "find_fused_step", lambda model: found.append(find(model)) or found[-1])
    try:
        model = random_model(KNOWN["llama"])
        engine = engine_of(model)
        sample(engine)
        packed = [weakref.ref(layer.down) for layer in found.pop()._layers]
        assert torch.get_num_threads() == 2
        model.model.layers[1].mlp.act_fn = Failing()
        with pytest.raises(ZeroDivisionError):
            sample(engine)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    found.clear()
    gc.collect()
    assert [ref() for ref in packed] == [None, None]
    assert not any("forward" in vars(module) for module in model.modules())


class Failing(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError


@pytest.mark.slow
def test_more_sequences_than_one_product_has_rows(monkeypatch):
    monkeypatch.setattr(invariance, "REFERENCES", (4, 1))
    monkeypatch.setattr(invariance, "LARGEST", 8)
    monkeypatch.setattr(invariance, "measured", invariance.Measured())
    model = random_model(KNOWN["llama"])
    few = sample(engine_of(model, max_sequences=4))
    many = sample(engine_of(model, max_sequences=15))
    assert [[c.token_ids for c in group] for group in few] == [[c.token_ids for c in group] for group in many]
