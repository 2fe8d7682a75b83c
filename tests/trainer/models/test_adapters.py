"""Adapters: they alone are trained, from the policy that was given, and what is saved is what was trained."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.policy.weights import weight_update
from tests.support import mixtures, runs, tiny

peft = pytest.importorskip("peft")


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.slow
def test_embeddings_that_are_trained_as_a_whole_stay_tied_to_the_head(tmp_path):
    adapter = lora()
    adapter.modules_to_save, adapter.ensure_weight_tying = ["embed_tokens"], True
    trained = runs.trainer(tmp_path, parts={"peft_config": adapter}, correct_built_in_engine=True)
    trained.train()
    ratios = [runs.history(trained, f"sampling/importance_sampling_ratio/{end}") for end in ("min", "max")]
    assert ratios == [pytest.approx([1.0, 1.0], abs=1e-4)] * 2  # the engine samples from what is trained


@pytest.mark.slow
@pytest.mark.parametrize(("method", "checkpointing"), [("grpo", True), ("rloo", False)])
def test_only_the_adapter_moves(tmp_path, method, checkpointing):
    trained = runs.trainer(
        tmp_path, method, parts={"peft_config": lora()}, beta=0.1, max_steps=3, gradient_checkpointing=checkpointing
    )
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.train()
    moved = {name for name, p in trained.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)
    kl = runs.history(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and abs(kl[-1]) > 0


@pytest.mark.slow
def test_a_peft_model_is_trained_as_it_is(tmp_path):
    model = peft.get_peft_model(tiny.model(), lora())
    trained = runs.trainer(tmp_path, parts={"model": model})
    trained.train()
    assert trained.model is model


def test_a_saved_adapter_gives_the_same_logprobs(tmp_path):
    trained = runs.trainer(tmp_path, parts={"peft_config": lora()}, max_steps=3)
    trained.train()
    trained.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(tiny.model(), str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    trained.model.eval()
    torch.testing.assert_close(loaded(ids).logits, trained.model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_resuming_an_adapter_is_exact(tmp_path):
    def make(output):
        return runs.trainer(
            output,
            parts={"peft_config": lora(), "model": tiny.model()},
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )

    straight = make(tmp_path / "a")
    straight.train()
    resumed = make(tmp_path / "a")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True):
        assert torch.equal(a, b)


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}
KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "ranks and scales by layer": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
    "the head as a whole": {"modules_to_save": ["lm_head"]},
    "embeddings as a whole": {"modules_to_save": ["embed_tokens"]},
    "embeddings by LoRA": {"target_modules": ["embed_tokens", "q_proj"]},
    "the head by LoRA": {"target_modules": ["lm_head", "q_proj"]},
    "a few tokens": {"trainable_token_indices": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]},
    "biases": {"bias": "lora_only"},
    "principal components": {"init_lora_weights": "pissa"},
    "experts": EXPERTS,
}


def base_for(kind):
    if kind == "experts":
        return mixtures.model("Qwen3Moe")
    return tiny.model(tie_word_embeddings=False, attention_bias=kind == "biases")


def adapter_of(kind):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **KINDS[kind]})


QUICK = ("dora", "the head as a whole", "embeddings by LoRA", "experts")
"""Kinds of which no two change the same part of the model; the rest is slow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_kind_is_trained_held_to_its_start_saved_and_sent(tmp_path, kind):
    base_for(kind).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    method = "rloo" if len(kind) % 2 else "grpo"
    trained = runs.trainer(
        tmp_path, method, parts={"model": base, "peft_config": adapter_of(kind)}, beta=0.1, max_steps=3
    )
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.train()
    moved = {name for name, p in trained.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in trained.model.named_parameters() if p.requires_grad}
    kl = runs.history(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and abs(kl[-1]) > 1e-7

    ids = torch.tensor([[5, 6, 7, 8]])
    expected = trained.model.eval()(ids).logits
    engine = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    engine.load_state_dict(_as_loaded(engine, {n: t.clone() for n, t in weight_update(trained.model, 0).tensors()}))
    torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)

    trained.save_model(str(tmp_path / "adapter"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PiSSA, whose base is not the one that was loaded
        loaded = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)


def _as_loaded(model, tensors):
    """Tensors of a checkpoint under the names of the model's own state, experts put together again."""
    if not any(".experts.0." in name for name in tensors):
        return tensors
    import tempfile

    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_only_the_active_one_of_several_adapters_is_trained(tmp_path):
    model = peft.get_peft_model(tiny.model(), lora())
    model.add_adapter("other", lora())
    model.set_adapter("other")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = runs.trainer(tmp_path, parts={"model": model}, beta=0.1)
    trained.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".other." in name for name in moved)
    trained.save_model(str(tmp_path / "saved"))
    loaded = peft.PeftModel.from_pretrained(tiny.model(), str(tmp_path / "saved" / "other")).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def with_a_trained_adapter():
    model = peft.get_peft_model(tiny.model(), lora())
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_reference_of_a_trained_adapter_is_that_adapter(tmp_path, method):
    trained = runs.trainer(tmp_path, method, parts={"model": with_a_trained_adapter()}, beta=0.1, max_steps=3)
    trained.train()
    kl = runs.history(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and abs(kl[-1]) > 1e-7
    ids = torch.tensor([[5, 6, 7, 8]])
    trained.model.eval()
    now = trained.model(ids).logits
    with trained.reference.model(trained.policy) as reference:
        torch.testing.assert_close(reference(ids).logits, with_a_trained_adapter().eval()(ids).logits)
    assert torch.equal(trained.model(ids).logits, now)  # and the policy is itself again


@pytest.mark.slow
def test_resuming_an_adapter_is_exact_and_keeps_its_reference(tmp_path):
    def make():
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "beta": 0.1}
        return runs.trainer(tmp_path, parts={"model": with_a_trained_adapter()}, **saving)

    straight = make()
    straight.train()
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True):
        assert torch.equal(a, b)
    assert runs.history(straight, "kl")[-2:] == runs.history(resumed, "kl")[-2:]


@pytest.mark.slow
def test_a_new_adapter_costs_no_reference(tmp_path):
    trained = runs.trainer(tmp_path, parts={"peft_config": lora()}, beta=0.1)
    trained.train()
    assert not trained.reference.stores_adapter and not trained.reference.state_dict()
