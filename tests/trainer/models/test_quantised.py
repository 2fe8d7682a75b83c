"""An adapter over weights in 4 or 8 bits: gradients, what is sent to engines, training, saving. On a CPU, too."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.layouts import LAYOUTS
from covey.policy.loading import load_policy
from covey.policy.quantization import check_shardable
from covey.policy.replicas import QUANTISED, FullCopy, frozen_sample
from covey.policy.scoring import TokenScorer
from covey.policy.sharded_tensors import is_shard
from covey.policy.weights import weight_update
from covey.trainer.resuming import check_same_frozen
from tests.support import mixtures, runs, tiny

pytest.importorskip("bitsandbytes", reason="needs `pip install bitsandbytes`")
peft = pytest.importorskip("peft")

NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_use_double_quant": True,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("model"), hidden_size=64, tie_word_embeddings=False)


def quantised(folder, settings=NF4, **changes):
    """The policy as a trainer loads it, its adapter not the zero that training starts with."""
    torch.manual_seed(0)
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapter = peft.LoraConfig(**{**lora, **changes})
    return load_policy(folder, quantization_config=BitsAndBytesConfig(**settings), peft_config=adapter)


def plain_twin(folder, policy, **changes):
    """The same numbers in ordinary weights."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.load_state_dict(sent(weight_update(policy, 0, adapter_only=True).base))
    torch.manual_seed(0)
    twin = peft.get_peft_model(base, policy.peft_config["default"])
    learned = {name: value for name, value in policy.state_dict().items() if "lora_" in name}
    twin.load_state_dict(learned, strict=False)
    return twin


def sent(update):
    return {spec.name: tensor.clone() for spec, tensor in update.checked()}


def gradients(model):
    model.zero_grad()
    logits = model(IDS).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if "lora_" in name}


def test_gradients_are_those_of_the_numbers_that_are_stored(folder):
    policy = quantised(folder)
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.uint8, torch.float32}
    twin = plain_twin(folder, policy)
    with torch.no_grad():
        before = policy.eval()(IDS).logits  # after an inference pass some CPUs' layers have no gradient
    expected, got = gradients(twin), gradients(policy.train())
    assert got.keys() == expected.keys() and len(got) > 0
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(before, twin(IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_used_before_has_its_gradients(folder):
    settings = BitsAndBytesConfig(**NF4)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)
    with torch.no_grad():
        base.eval()(IDS)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy = load_policy(base, peft_config=lora)
    expected, got = gradients(plain_twin(folder, policy)), gradients(policy.train())
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=name)


KINDS = {
    "lora": (NF4, {}, 1e-5),
    "fp4": ({**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}, {}, 1e-5),
    "dora and a whole module": (NF4, {"use_dora": True, "modules_to_save": ["norm"]}, 1e-5),
    "the head as well": ({**NF4, "llm_int8_skip_modules": []}, {"target_modules": ["lm_head", "q_proj"]}, 1e-5),
    "8 bits, which round activations too": ({"load_in_8bit": True}, {}, 0.2),
}


@pytest.mark.parametrize(("settings", "changes", "tolerance"), KINDS.values(), ids=KINDS)
def test_merged_weights_give_the_policys_logits(folder, settings, changes, tolerance):
    policy = quantised(folder, settings, **changes).eval()
    expected = policy(IDS).logits
    update = weight_update(policy, 0, dtype=torch.bfloat16)
    assert {spec.dtype for spec in update.specs if len(spec.shape) > 1} == {torch.bfloat16}
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.load_state_dict(sent(weight_update(policy, 0)))  # strict: every name of the checkpoint, no other
    torch.testing.assert_close(engine(IDS).logits, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(policy(IDS).logits, expected, rtol=0, atol=0)  # and is as it was


@pytest.mark.parametrize("head", [False, True])
def test_layouts_agree(folder, head):
    settings = {**NF4, "llm_int8_skip_modules": []} if head else NF4
    policy = quantised(folder, settings, target_modules=["lm_head", "v_proj"] if head else "all-linear")
    rollouts = [Rollout([5, 6], ids, [True] * len(ids), None, "", FinishReason.STOP) for ids in ([7, 8, 9], [9])]
    results = {}
    for layout in LAYOUTS:
        policy.zero_grad()
        scorer = TokenScorer(lambda m: m, temperature=1.0, layout=layout, chunk_size=2)
        scores = scorer(policy, collate(rollouts), entropy=True)
        (scores.logprobs + 0.1 * scores.entropies).sum().backward()
        results[layout] = [scores.logprobs, *(p.grad for p in policy.parameters() if p.requires_grad)]
    for layout in ("shared_prefix", "packed"):
        for mine, theirs in zip(results[layout], results["padded"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_fused_experts_stay_as_they_are_and_a_warning_says_so(tmp_path):
    folder = str(tmp_path / "model")
    mixtures.model("Qwen3Moe").save_pretrained(folder)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.warns(UserWarning, match=r"quantised .* leaves .*% of the weights unquantised.*gate_up_proj"):
        policy = load_policy(folder, quantization_config=BitsAndBytesConfig(**NF4), peft_config=lora)
    experts = {p.dtype for name, p in policy.named_parameters() if name.endswith("gate_up_proj")}
    assert experts == {torch.float32}


def trainer_of(folder, output, method="grpo", **changes):
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"model": folder, "processing_class": None, "peft_config": lora}
    if "model_init_kwargs" not in changes:
        parts["quantization_config"] = BitsAndBytesConfig(**NF4)
    return runs.trainer(output, method, parts=parts, **{"beta": 0.1, "max_steps": 3, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(("method", "checkpointing"), [("grpo", False), ("rloo", True)])
def test_only_the_adapter_moves_and_reloads(tmp_path, folder, method, checkpointing):
    trained = trainer_of(folder, tmp_path, method, gradient_checkpointing=checkpointing)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.train()
    moved = {name for name, p in trained.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)
    kl = runs.history(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and abs(kl[-1]) > 0
    trained.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**NF4), dtype=torch.float32
    )
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).train()
    torch.testing.assert_close(loaded(IDS).logits, trained.model.train()(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_model_init_kwargs_may_ask_for_it_and_resuming_is_exact(tmp_path, folder):
    asked = json.dumps({"quantization_config": NF4})
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "model_init_kwargs": asked}
    straight = trainer_of(folder, tmp_path, **saving)
    assert straight.policy.get_base_model().is_quantized
    straight.train()
    resumed = trainer_of(folder, tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True):
        assert torch.equal(a, b)


def changed(policy):
    """The policy with other weights in one layer, which is quantised."""
    packed = policy.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    packed.data = packed.data.flip(0)
    return policy


@pytest.mark.parametrize("settings", [NF4, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
def test_a_quantised_base_is_recognised(folder, settings):
    policy = quantised(folder, settings)
    saved = frozen_sample(policy)
    assert {kind for kind, _ in saved.values()} > {QUANTISED}
    policy(IDS)
    check_same_frozen("checkpoint-1", saved, frozen_sample(policy), adapter=True)
    other = {"load_in_8bit": True} if settings is NF4 else NF4
    plain = load_policy(folder, peft_config=peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for another in (changed(policy), quantised(folder, other), plain):
        with pytest.raises(ValueError, match="trained on another base model"):
            check_same_frozen("checkpoint-1", saved, frozen_sample(another), adapter=True)


# ---- spread over processes ------------------------------------------------------------------------------------------


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_weights_sharded_by_fsdp2_are_sent_and_sampled_whole(folder, one_process):
    from torch.distributed.fsdp import fully_shard

    policy = quantised(folder, {**NF4, "bnb_4bit_quant_storage": "float32"})
    before = sent(weight_update(policy, 0)), sent(weight_update(policy, 0, adapter_only=True).base)
    sample = frozen_sample(policy)
    logits = policy(IDS).logits
    gathered, rounded = (FullCopy(policy, lambda: policy, dtype) for dtype in (None, torch.bfloat16))
    sharded = fully_shard(policy)
    layer = sharded.base_model.model.model.layers[0].mlp.down_proj.base_layer
    assert is_shard(layer.weight) and type(layer.weight).__name__ != "Params4bit"
    after = sent(weight_update(sharded, 0)), sent(weight_update(sharded, 0, adapter_only=True).base)
    for ours, theirs in zip(after, before, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    again = frozen_sample(sharded)
    assert sample.keys() == again.keys() and all(torch.equal(few, again[name][1]) for name, (_, few) in sample.items())
    with gathered.weights(), torch.no_grad():
        torch.testing.assert_close(gathered.model(IDS).logits, logits)
    with rounded.weights():
        twin = rounded.model.base_model.model
        assert twin.lm_head.weight.dtype == torch.bfloat16
        assert twin.model.layers[0].mlp.down_proj.base_layer.weight.dtype == torch.float32  # bytes, not numbers


@pytest.mark.parametrize(
    ("settings", "sharding", "computes_in", "says"),
    [
        ({"load_in_8bit": True}, "FSDP2", None, "FSDP2 .* 8 bits"),
        (NF4, "ZeRO-3", None, "ZeRO-3 .* 4 bits.*DDP or ZeRO-2"),
        ({"quant_method": "gptq", "bits": 4}, "FSDP2", None, "quantised with gptq"),
        ({**NF4, "bnb_4bit_quant_storage": "float32"}, "FSDP2", "bfloat16", "Set bnb_4bit_quant_storage='bfloat16'"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_loading(settings, sharding, computes_in, says):
    kinds = [settings] if "quant_method" in settings else [settings, BitsAndBytesConfig(**settings)]
    for quantization in kinds:
        with pytest.raises(ValueError, match=says):
            check_shardable(quantization, sharding, computes_in)


def test_what_can_be_spread_is_not_refused():
    for storage in ("uint8", "bfloat16"):
        check_shardable(BitsAndBytesConfig(**NF4, bnb_4bit_quant_storage=storage), "FSDP2", "bfloat16")
    check_shardable(BitsAndBytesConfig(**NF4, bnb_4bit_quant_storage="float32"), "FSDP2", None)
    check_shardable({"load_in_8bit": True}, "", "bfloat16")
    check_shardable(None, "ZeRO-3", None)


def test_weights_of_torchao_train_an_adapter_and_are_not_sent(folder, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"model": folder, "peft_config": lora, "quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    trainer = runs.trainer(tmp_path, parts=parts)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
    with pytest.raises(ValueError, match="quantised with torchao and cannot be sent as a checkpoint"):
        sent(weight_update(trainer.policy, 0))
