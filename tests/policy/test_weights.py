"""What is sent is what `save_pretrained` would write, whatever the policy is wrapped in."""

import json

import pytest
import torch
from safetensors.torch import load_file

from covey.policy.adapters import why_not_alone
from covey.policy.weights import weight_update
from tests.support import tiny, tiny_vision

peft = pytest.importorskip("peft")


def lora(**changes):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


def adapted(seed=0, tied=True, **changes):
    """A model with an adapter that does something: PEFT starts with zeros."""
    model = peft.get_peft_model(tiny.model(tie_word_embeddings=tied), lora(**changes))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def sent(update):
    """Everything a pass yields; `checked` raises where it is not what was announced."""
    return {spec.name: tensor.clone() for spec, tensor in update.checked()}


def assert_same(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_sent_tensors_equal_the_checkpoints(tmp_path, tied):
    model = tiny.model(tie_word_embeddings=tied)
    assert ("lm_head.weight" in sent(weight_update(model, 0))) is not tied
    assert_same(sent(weight_update(model, 0)), saved(model, tmp_path), rtol=0, atol=0)


def test_fused_experts_are_sent_as_their_checkpoint_has_them(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    names = sent(weight_update(model, 0)).keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names  # one tensor for all experts inside the model
    assert_same(sent(weight_update(model, 0)), saved(model, tmp_path), rtol=0, atol=0)


def test_wrappers_do_not_change_names():
    model = tiny.model()
    plain = sent(weight_update(model, 0))
    compiled = torch.compile(model)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_same(sent(weight_update(compiled, 0)), plain, rtol=0, atol=0)


CASES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "biases": {"bias": "lora_only"},
    "ranks differ": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "whole modules": {"modules_to_save": ["norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"], "tied": False},
    "tokens": {"trainable_token_indices": [3, 5]},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_merged_weights_equal_pefts_and_leave_the_policy_alone(tmp_path, changes):
    model = adapted(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    got = sent(weight_update(model, 0))
    assert_same(model.state_dict(), before, rtol=0, atol=0)
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert_same(got, saved(model.merge_and_unload(), tmp_path), rtol=1e-6, atol=1e-6)


def test_merged_weights_give_the_adapted_models_logits():
    model = adapted(use_dora=True, modules_to_save=["norm"])
    ids = torch.tensor([[5, 6, 7, 8]])
    other = tiny.model(seed=7)
    other.load_state_dict(sent(weight_update(model, 0)), strict=False)
    torch.testing.assert_close(other(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def test_only_the_active_adapter_is_merged(tmp_path):
    model = adapted()
    model.add_adapter("other", lora(r=2, init_lora_weights=False))
    model.set_adapter("other")
    got = sent(weight_update(model, 0))
    model.delete_adapter("default")
    assert_same(got, saved(model.merge_and_unload(), tmp_path), rtol=1e-6, atol=1e-6)


def test_adapter_update_names_its_base(tmp_path):
    base = weight_update(adapted(), 0, adapter_only=True).base
    assert_same(sent(base), saved(tiny.model(), tmp_path), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["default", "second"])
def test_an_adapter_alone_is_its_saved_folder(tmp_path, name):
    model = adapted()
    if name != "default":
        model.add_adapter(name, lora(r=2, init_lora_weights=False))
        model.set_adapter(name)
    update = weight_update(model, 3, adapter_only=True)
    model.save_pretrained(tmp_path, selected_adapters=[name])
    folder = tmp_path if name == "default" else tmp_path / name
    assert_same(sent(update), load_file(folder / "adapter_model.safetensors"), rtol=0, atol=0)
    config, expected = json.loads(json.dumps(update.adapter)), json.loads((folder / "adapter_config.json").read_text())
    for settings in (config, expected):
        settings["target_modules"] = sorted(settings["target_modules"])  # a set, in any order
    assert config == expected


def test_matrices_are_sent_in_the_narrower_dtype():
    update = weight_update(adapted(), 0, dtype=torch.bfloat16)
    assert all(t.dtype == (torch.bfloat16 if t.dim() > 1 else torch.float32) for t in sent(update).values())
    half = weight_update(tiny.model().bfloat16(), 0, dtype=torch.float32)
    assert {tensor.dtype for tensor in sent(half).values()} == {torch.bfloat16}  # a wider one adds nothing


def test_update_can_be_read_again_with_current_weights():
    model = adapted()
    update = weight_update(model, 0)
    first = sent(update)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").add_(1.0)
    second = sent(update)
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]


def test_a_quantised_base_is_not_sent_but_its_adapter_is():
    model = adapted()
    model.get_base_model().is_quantized = True
    with pytest.raises(ValueError, match=r"quantised.*vllm_lora_sync='adapter'"):
        weight_update(model, 0)
    alone = weight_update(model, 0, adapter_only=True)
    assert alone.nbytes > 0 and alone.base is None


def test_model_without_adapter_cannot_send_one():
    with pytest.raises(ValueError, match="LlamaForCausalLM has none"):
        weight_update(tiny.model(), 0, adapter_only=True)


@pytest.mark.parametrize(("case", "alone"), [("lora", True), ("rslora", True), ("dora", False), ("tokens", False)])
def test_adapters_that_servers_cannot_load_are_detected(case, alone):
    assert (why_not_alone(adapted(**CASES[case])) is None) is alone


@pytest.mark.parametrize(("modules", "alone"), [(r".*language_model.*q_proj", True), (["q_proj"], False)])
def test_an_adapter_of_the_encoder_of_images_is_merged(modules, alone):
    """Servers know adapters of the language model; the encoder has a q_proj as well."""
    model, _ = tiny_vision.make("gemma3")
    assert (why_not_alone(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules))) is None) is alone


@pytest.mark.parametrize("family", sorted(tiny_vision.MAKERS))
def test_vision_language_models_use_checkpoint_names(family, tmp_path):
    if family in tiny_vision.NEEDS_TORCHVISION and not tiny_vision.HAS_TORCHVISION:
        pytest.skip("this family's processor needs torchvision: tools/install_torchvision.py")
    model, _ = tiny_vision.make(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(weight_update(model, 0).tensors())
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())


ONE_OF_TWO = {
    "the embeddings as a whole": {"modules_to_save": ["embed_tokens"]},
    "the head by LoRA": {"target_modules": ["lm_head", "q_proj"]},
    "both, each for itself": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`", "ignore:Model has `tie_word_embeddings=True`"
)
@pytest.mark.parametrize("changes", ONE_OF_TWO.values(), ids=ONE_OF_TWO)
def test_adapter_that_unties_embeddings_is_not_merged(changes):
    model = adapted(**changes)
    with pytest.raises(ValueError, match=r"ties lm_head and model.embed_tokens.*ensure_weight_tying"):
        weight_update(model, 0)


ALIKE = {
    "both as a whole": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both by LoRA": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "a few tokens": {"trainable_token_indices": [5, 6, 7]},
}


@pytest.mark.parametrize("changes", ALIKE.values(), ids=ALIKE)
def test_adapter_that_changes_tied_weights_equally_is_merged(changes):
    model = adapted(**changes)
    engine = tiny.model(seed=1)
    engine.load_state_dict(sent(weight_update(model, 0)), strict=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(engine(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
