"""The weights under an adapter are recognised, whatever is trained on top of them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.policy.replicas import frozen_sample
from covey.trainer.resuming import check_same_frozen, warn_of_uncompared
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
    check_same_frozen("checkpoint-1", saved, frozen_sample(model), adapter=True)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: list(settings)[-1])
def test_what_is_trained_on_a_base_leaves_it_the_same(settings):
    model = adapted(**settings)
    saved = frozen_sample(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1
    model.add_adapter("reference", LoraConfig(target_modules=["v_proj"]))
    checked(saved, model)
    assert saved.keys() == frozen_sample(model).keys() and sum(few.numel() for _, few in saved.values()) > 50
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, adapted(seed=1, **settings))


def test_a_sample_of_weights_holds_no_whole_weight():
    """torch saves all of a tensor with a view of it."""
    samples = [few for _, few in frozen_sample(adapted(**KINDS[0])).values()]
    assert {few.untyped_storage().nbytes() // few.nbytes for few in samples} == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_is_recognised_in_another_dtype(dtype):
    saved = frozen_sample(adapted(**KINDS[0]))
    checked(saved, adapted(**KINDS[0]).to(dtype))
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, adapted(seed=1, **KINDS[0]).to(dtype))


def test_the_same_dtype_allows_no_difference():
    saved, other = frozen_sample(adapted(**KINDS[0])), adapted(**KINDS[0])
    other.get_base_model().model.norm.weight.data *= 1 + 1e-6
    with pytest.raises(ValueError, match="trained on another base model"):
        checked(saved, other)


def test_the_weight_that_differs_is_named():
    saved, other = frozen_sample(tiny.model().requires_grad_(False)), tiny.model().requires_grad_(False)
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    wanted = r"1 of 20 weights differ, .* such as model\.layers\.1\.mlp\.up_proj\.weight\. The reference is the model"
    with pytest.raises(ValueError, match=wanted):
        check_same_frozen("checkpoint-1", saved, frozen_sample(other), adapter=False)


def test_a_whole_model_has_no_base():
    assert frozen_sample(tiny.model()) == {}
    checked(None, adapted(**KINDS[0]))  # a checkpoint of an earlier version


def test_a_base_that_cannot_be_compared_is_warned_of():
    policy = adapted(**KINDS[0])
    base = policy.get_base_model()
    base.is_quantized, base.config.quantization_config = True, {"quant_method": "gptq"}
    with pytest.warns(UserWarning, match="which gptq has quantised, cannot be compared .* in 'checkpoint-1'"):
        warn_of_uncompared("checkpoint-1", policy)
