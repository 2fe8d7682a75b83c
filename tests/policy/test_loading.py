"""What loading does to a model."""

import pytest
import torch

import tiny
from covey.policy.loading import disable_dropout, has_dropout, load_policy


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
    from covey.core.rollout import FinishReason, Rollout
    from covey.policy.scoring import TokenScorer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_policy(tiny.model(), peft_config=peft.LoraConfig(r=2, target_modules=["lm_head"]))
    batch = collate([Rollout([5], [6, 7], [True, True], None, "", FinishReason.STOP)])
    with pytest.raises(ValueError, match="needs a plain linear head"):
        TokenScorer(lambda m: m, temperature=1.0, float32_head=True)(model, batch)
