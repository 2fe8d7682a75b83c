"""Models with a running state train like others: sampled by their own engine, scored in padded rows."""

import warnings

import pytest
import torch

from covey.engines.native.recurrent_engine import RecurrentEngine
from tests.support import hybrids, runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lfm2", "Qwen3Next", "Mamba"])
def test_a_hybrid_trains_on_what_it_samples(tmp_path, name):
    model = hybrids.model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match=f"{name}ForCausalLM cannot use the packed layouts"):
        trained = runs.trainer(tmp_path, parts={"model": model}, max_steps=2)
        assert isinstance(trained.collector.engine, RecurrentEngine)
        trained.train()  # compares the engine's log-probs with the scorer's
    assert trained.scorer.layout == "padded" and trained.state.global_step == 2
    moved = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert any("embed" in key for key in moved) and len(moved) > len(before) / 2


@pytest.mark.slow
def test_a_hybrid_trains_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "in_proj"], task_type="CAUSAL_LM")
    parts = {"model": hybrids.model("Lfm2"), "peft_config": adapter}
    trained = runs.trainer(tmp_path, parts=parts, attn_layout="padded", learning_rate=0.1)
    before = {key: value.clone() for key, value in trained.model.state_dict().items() if "lora_B" in key}
    trained.train()
    assert any(not torch.equal(trained.model.state_dict()[key], value) for key, value in before.items())


def test_padded_layout_silences_the_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*packed layouts.*")
        runs.trainer(tmp_path, parts={"model": hybrids.model("Lfm2")}, max_steps=1, attn_layout="padded").train()
