"""The weights under an adapter are recognised, whatever is trained on top of them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.policy.adapters import base_sample
from covey.trainer.checkpoint import _check_same_base, _warn_of_uncompared
from tests.support import tiny

KINDS = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj"], "bias": "all"},
    {"target_modules": ["q_proj"], "use_dora": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
]


def adapted(seed=0, **settings):
    return get_peft_model(tiny.model(seed=seed), LoraConfig(task_type="CAUSAL_LM", **settings))


def checked(saved, model):
    _check_same_base("checkpoint-1", saved, base_sample(model))


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: list(settings)[-1])
def test_what_is_trained_on_a_base_leaves_it_the_same(settings):
    model = adapted(**settings)
    saved = base_sample(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1
    model.add_adapter("reference", LoraConfig(target_modules=["v_proj"]))
    checked(saved, model)
    assert saved[1].shape == base_sample(model)[1].shape and saved[1].numel() > 50
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, adapted(seed=1, **settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_is_recognised_in_another_dtype(dtype):
    saved = base_sample(adapted(**KINDS[0]))
    checked(saved, adapted(**KINDS[0]).to(dtype))
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, adapted(seed=1, **KINDS[0]).to(dtype))


def test_the_same_dtype_allows_no_difference():
    saved, other = base_sample(adapted(**KINDS[0])), adapted(**KINDS[0])
    other.get_base_model().model.norm.weight.data *= 1 + 1e-6
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, other)


def test_a_whole_model_has_no_base():
    assert base_sample(tiny.model()) is None
    checked(None, adapted(**KINDS[0]))  # a checkpoint of an earlier version


def test_a_base_that_cannot_be_compared_is_warned_of():
    policy = adapted(**KINDS[0])
    base = policy.get_base_model()
    base.is_quantized, base.config.quantization_config = True, {"quant_method": "gptq"}
    with pytest.warns(UserWarning, match="which gptq has quantised, cannot be compared .* in 'checkpoint-1'"):
        _warn_of_uncompared("checkpoint-1", policy)
