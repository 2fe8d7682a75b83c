"""The weights under an adapter are recognised, whatever is trained on top of them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.policy.adapters import base_digest
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


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: list(settings)[-1])
def test_training_changes_no_digest_and_another_base_does(settings):
    model = adapted(**settings)
    digest = base_digest(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1
    model.add_adapter("reference", LoraConfig(target_modules=["v_proj"]))
    assert base_digest(model) == digest == base_digest(adapted(**settings))
    assert base_digest(adapted(seed=1, **settings)) != digest


def test_another_dtype_is_said_and_a_whole_model_has_no_digest():
    model = adapted(**KINDS[0])
    assert base_digest(model)[0] == "torch.float32" and base_digest(model.bfloat16())[0] == "torch.bfloat16"
    assert base_digest(tiny.model()) is None
