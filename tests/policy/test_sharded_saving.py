"""A policy saved part by part is the folder that `save_pretrained` would have written."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.core.engine import TensorSpec
from covey.policy.weights import plan_files, save_sharded
from tests.support import tiny

peft = pytest.importorskip("peft")


def spec(name, numbers):
    return TensorSpec(name, (numbers,), torch.uint8)


def test_files_respect_the_size_limit_but_for_single_tensors():
    planned = plan_files((spec("a", 4), spec("b", 3), spec("c", 5), spec("d", 20), spec("e", 1)), 8)
    assert {file: [one.name for one in specs] for file, specs in planned.items()} == {
        "model-00001-of-00004.safetensors": ["a", "b"],
        "model-00002-of-00004.safetensors": ["c"],
        "model-00003-of-00004.safetensors": ["d"],
        "model-00004-of-00004.safetensors": ["e"],
    }
    assert list(plan_files((spec("a", 4),), 8)) == ["model.safetensors"]


@pytest.mark.parametrize("file_bytes", [10**9, 10_000])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_loads_as_it_was(tmp_path, file_bytes, tied):
    model = tiny.model(tie_word_embeddings=tied)
    save_sharded(model, tmp_path, writes=True, file_bytes=file_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert (tmp_path / "model.safetensors").exists() == (file_bytes == 10**9)


def test_only_the_writing_process_writes(tmp_path):
    save_sharded(tiny.model(), tmp_path / "none", writes=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
    ids=["lora", "dora", "a whole module", "an embedding", "tokens"],
)
def test_an_adapter_loads_as_it_was(tmp_path, settings):
    base = tiny.model(tie_word_embeddings=False)
    policy = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, **settings))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    save_sharded(policy, tmp_path, writes=True)
    loaded = peft.PeftModel.from_pretrained(tiny.model(tie_word_embeddings=False), tmp_path)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy(ids).logits)


def test_each_of_several_adapters_is_saved(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(tiny.model(), config)
    policy.add_adapter("second", config)
    save_sharded(policy, tmp_path, writes=True)
    loaded = peft.PeftModel.from_pretrained(tiny.model(), tmp_path / "second")
    ours = policy.base_model.model.model.layers[0].self_attn.q_proj.lora_A["second"].weight
    assert torch.equal(loaded.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight, ours)
