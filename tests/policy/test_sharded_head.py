"""Scores worked out inside the head's call are those worked out after it, and hooks see whole passes."""

import pytest
import torch

from covey.core.batch import collate
from covey.policy.scoring import TokenScorer
from tests.policy.test_scoring import gradients, rollouts
from tests.support import tiny

peft = pytest.importorskip("peft")


def scorer(**settings):
    return TokenScorer(lambda model: model, temperature=0.7, **settings)


def lora_head():
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny.model(tie_word_embeddings=False), config).double()


@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize(
    "make", [lambda: tiny.model().double(), lora_head], ids=["a tied head", "an adapter on the head"]
)
def test_sharded_head_gives_the_same_scores_and_gradients(make, layout):
    model, batch = make().train(), collate(rollouts())
    after = scorer(layout=layout, chunk_size=4)(model, batch, entropy=True)
    inside = scorer(layout=layout, chunk_size=4, inside_head_call=True)(model, batch, entropy=True)
    torch.testing.assert_close(inside[:2], after[:2], rtol=1e-12, atol=1e-12)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.parameters = lambda: trained
    for mine, theirs in zip(gradients(model, *inside[:2]), gradients(model, *after[:2]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_head_is_restored_and_entropies_are_optional():
    model, batch = tiny.model(), collate(rollouts())
    expected = model(torch.tensor([[5, 6, 7]])).logits
    scores = scorer(inside_head_call=True)(model, batch)
    assert scores.entropies is None and "forward" not in vars(model.lm_head)
    torch.testing.assert_close(model(torch.tensor([[5, 6, 7]])).logits, expected)


def test_model_output_gets_its_gradient_before_the_head():
    model, seen = tiny.model(), []

    def note(name):
        def forward_hook(module, args, output):
            tensor = output if torch.is_tensor(output) else output[0]
            tensor.register_hook(lambda grad: seen.append((name, bool(grad.any()))))

        return forward_hook

    inside = scorer(layout="padded", inside_head_call=True)
    batch = collate(rollouts())
    inside.layout_of(model, batch)
    model.register_forward_hook(note("model"))
    model.get_decoder().norm.register_forward_hook(note("norm"))
    inside(model, batch).logprobs.sum().backward()
    assert seen == [("model", False), ("norm", True)]


def test_batch_without_learned_tokens_has_zero_gradients():
    model = tiny.model()
    inside = scorer(inside_head_call=True)
    batch = collate(rollouts()).idle()
    scores = inside(model, batch, entropy=True)
    assert scores.logprobs.tolist() == [0.0]
    scores.logprobs.sum().backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_a_model_that_calls_its_head_twice_is_refused():
    model = tiny.model()
    forward = model.forward

    def twice(*args, **kwargs):
        model.lm_head(torch.zeros(1, 1, 32))
        return forward(*args, **kwargs)

    model.forward = twice
    with pytest.raises(ValueError, match="calls its head 2 times"):
        scorer(layout="padded", inside_head_call=True)(model, collate(rollouts()))
