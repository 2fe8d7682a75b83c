"""What loading does to a model."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2PreTrainedModel, GenerationConfig

from covey.policy.loading import disable_dropout, has_dropout, load_policy
from tests.support import tiny


def test_no_dropout_is_left():
    model = tiny.model(attention_dropout=0.5).train()
    disable_dropout(model)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("where", ["nowhere", "attention", "adapter"])
def test_dropout_is_found_wherever_it_is(where):
    peft = pytest.importorskip("peft")
    model = tiny.model(attention_dropout=0.5 if where == "attention" else 0.0)
    if where == "adapter":
        model = load_policy(model, peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    assert has_dropout(model) == (where != "nowhere")
    disable_dropout(model)
    assert not has_dropout(model)


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="virtual tokens"):
        load_policy(tiny.model(), peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_a_float32_head_with_an_adapter_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    import warnings

    from covey.core.batch import collate
    from covey.core.records import FinishReason, Rollout
    from covey.policy.scoring import TokenScorer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_policy(tiny.model(), peft_config=peft.LoraConfig(r=2, target_modules=["lm_head"]))
    batch = collate([Rollout([5], [6, 7], [True, True], None, "", FinishReason.STOP)])
    with pytest.raises(ValueError, match="needs a plain linear head"):
        TokenScorer(lambda m: m, temperature=1.0, float32_head=True)(model, batch)


def test_soft_capping_models_do_not_load_with_sdpa(monkeypatch):
    """As transformers 5.17 does, whose SDPA drops the cap of Gemma 2."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 4}
    config = Gemma2Config(**size, **heads, attn_logit_softcapping=0.5)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="sdpa")
    written_out = Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    written_out.load_state_dict(model.state_dict())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(load_policy(model)(ids).logits, written_out(ids).logits)


def test_a_damaged_weight_file_names_the_folder(tmp_path):
    tiny.folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model' cannot be loaded as a causal language model"):
        load_policy(str(tmp_path / "model"))


def generation_config(**settings):
    model = tiny.model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("adapter", [False, True])
def test_a_generation_config_that_could_not_be_saved_is_corrected(tmp_path, adapter):
    """As of checkpoints that name a temperature and do not sample."""
    peft = pytest.importorskip("peft")
    model = generation_config(do_sample=False, temperature=0.6, top_p=0.9)
    peft_config = peft.LoraConfig(r=2, target_modules=["q_proj"]) if adapter else None
    with pytest.warns(UserWarning, match="do_sample=False"):
        loaded = load_policy(model, peft_config=peft_config)
    model.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.6, 0.9)
    assert loaded.generation_config.do_sample


def test_a_valid_generation_config_stays_as_it_is(recwarn):
    load_policy(generation_config(do_sample=True, temperature=0.6))
    greedy = load_policy(generation_config(do_sample=False))
    assert greedy.generation_config.do_sample is False and not list(recwarn)


def test_a_generation_config_that_sampling_does_not_correct_is_refused():
    with pytest.raises(ValueError, match=r"max_new_tokens.* is -1"):
        load_policy(generation_config(max_new_tokens=-1))
