"""LoRA: the adapter alone is trained, and the reference is the model without it."""

import pytest
import runs
import torch

import tiny

peft = pytest.importorskip("peft")


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
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
