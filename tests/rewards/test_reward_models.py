"""Sequence classifiers as reward functions, on a tiny random Llama with a byte-level tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from covey.core.findings import CheckError
from covey.rewards import RewardError, RewardSuite
from covey.rewards.functions import FailedReward
from covey.rewards.models import ModelReward

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"


def make_tokenizer(**special):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {char: index + 2 for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def tokenizer():
    return make_tokenizer(pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE)


def make_model(num_labels=1, kind=LlamaForSequenceClassification):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=None,
        num_labels=num_labels,
    )
    return kind(config)


TEXTS = ["a", "a much longer completion than the others", "mid size", "", "bb"]


def by_hand(model, tokenizer, text):
    """The logit of one unpadded text."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, 0].item()


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_rewards_do_not_depend_on_the_batch_size(score, tokenizer, batch_size):
    model = make_model()
    suite = RewardSuite(model, processing_classes=tokenizer, batch_size=batch_size)
    rewards, _ = score(suite, TEXTS, [f"question {i}: " for i in range(5)])
    expected = [by_hand(model, tokenizer, f"question {i}: {text}") for i, text in enumerate(TEXTS)]
    assert [row[0] for row in rewards] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 5  # the texts do get different rewards


def test_messages_go_through_the_models_own_chat_template(score, tokenizer):
    model = make_model()
    prompts = [[{"role": "user", "content": "hi"}]] * 2
    completions = [[{"role": "assistant", "content": "hello"}], "hello"]  # a plain completion is the assistant's
    rewards, _ = score(RewardSuite(model, processing_classes=[tokenizer]), completions, prompts)
    expected = by_hand(model, tokenizer, "<user>hi<eos><assistant>hello<eos>")
    assert [row[0] for row in rewards] == pytest.approx([expected] * 2, abs=1e-5)


def test_a_model_is_frozen_and_stands_beside_functions(score, tokenizer):
    def length(completions, **kwargs):
        return [len(text) for text in completions]

    model = make_model().train()
    suite = RewardSuite([length, model], processing_classes=[None, tokenizer], weights=[0.5, 2.0])
    assert suite.names == ["length", "LlamaForSequenceClassification"]
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    rewards, _ = score(suite, ["ab"])
    assert rewards[0][0] == 2.0 and rewards[0][1] is not None


def test_a_path_loads_the_model_and_its_tokenizer_and_names_it(score, tokenizer, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "my-rm")
    tokenizer.save_pretrained(tmp_path / "my-rm")
    suite = RewardSuite(f"{tmp_path}/my-rm/", model_init_kwargs={"dtype": "float32"}, device="cpu")
    assert suite.names == ["my-rm"]
    assert score(suite, ["text"], ["prompt "])[0][0] == pytest.approx([by_hand(model, tokenizer, "prompt text")])
    again = RewardSuite([suite.functions[0].model])  # an object that was loaded from somewhere knows its tokenizer
    assert again.names == ["my-rm"] and again.functions[0].tokenizer.pad_token == "<pad>"


def test_the_pad_token_falls_back_to_eos(score):
    suite = RewardSuite(make_model(), processing_classes=make_tokenizer(eos_token="<eos>"), batch_size=8)
    assert suite.functions[0].tokenizer.pad_token == "<eos>"
    assert score(suite, ["a", "longer"])[0][0][0] is not None


@pytest.mark.parametrize(
    ("own", "scored"),
    [
        (None, -1),  # no padding in the config: the last token, which is <eos>
        (0, -1),  # <pad>
        (1, -2),  # <eos>, which the head leaves out, alone as in a batch
        (-1, -1),  # Llama's early configs: no token
    ],
)
@pytest.mark.parametrize("special", [{"pad_token": "<eos>"}, {}])
def test_the_end_of_a_turn_is_scored_also_where_the_tokenizer_pads_with_it(score, own, scored, special):
    tokenizer = make_tokenizer(eos_token="<eos>", chat_template=CHAT_TEMPLATE, **special)
    model = make_model()
    model.config.pad_token_id = own
    prompts = [[{"role": "user", "content": "hi"}]] * 3
    rewards, _ = score(RewardSuite(model, processing_classes=[tokenizer]), ["a", "longer", ""], prompts)
    assert model.config.pad_token_id == own
    for (reward,), text in zip(rewards, ["a", "longer", ""], strict=True):
        ids = tokenizer(f"<user>hi<eos><assistant>{text}<eos>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
        assert reward == pytest.approx(model.score(states[scored]).item(), abs=1e-5)


def test_wrong_models_and_tokenizers_are_explained(score, tokenizer, tmp_path):
    with pytest.raises(CheckError, match="pad_token") as error:
        RewardSuite(make_model(), processing_classes=make_tokenizer())
    assert error.value.codes == ["reward-model"]
    with pytest.raises(CheckError, match="num_labels=3") as error:
        RewardSuite(make_model(num_labels=3), processing_classes=tokenizer)
    assert error.value.codes == ["reward-model"]
    with pytest.raises(CheckError, match="`reward_processing_classes`") as error:
        RewardSuite(make_model())
    assert error.value.codes == ["reward-model"]
    with pytest.raises(CheckError, match="/no-such-model'") as error:
        RewardSuite(str(tmp_path / "no-such-model"))
    assert error.value.codes == ["reward-model"]
    make_model(num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(CheckError, match="/three'") as error:
        RewardSuite(str(tmp_path / "three"), processing_classes=tokenizer)
    assert error.value.codes == ["reward-model"]
    template_free = make_tokenizer(pad_token="<pad>")
    with pytest.raises(RewardError, match="has no chat template"):
        score(RewardSuite(make_model(), processing_classes=template_free), ["a"], [[{"role": "user", "content": "b"}]])


def test_a_causal_model_is_not_a_reward_model(score, tokenizer, tmp_path):
    causal = make_model(kind=LlamaForCausalLM)
    with pytest.raises(RewardError, match=r"returned logits of shape \(1, 3, 258\)"):
        score(RewardSuite(causal, processing_classes=tokenizer), ["abc"], [""])
    causal.save_pretrained(tmp_path / "causal")
    with pytest.warns(UserWarning, match=r"no trained weights for score\.weight"):
        RewardSuite(str(tmp_path / "causal"), processing_classes=tokenizer)


def test_a_text_gets_the_tokens_that_the_tokenizer_adds_once(tokenizer):
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    reward = ModelReward(make_model(), tokenizer, "decoder")
    assert reward.encode("ab") == reward.encode("<eos>ab") == [1, *reward.encode("ab", rendered=True)]


def test_a_sample_beyond_the_context_fails_alone(score, tokenizer):
    reward = ModelReward(make_model(), tokenizer, "decoder")  # 128 positions
    short, long = reward.score(["a" * 128, "a" * 129])
    assert short == pytest.approx(by_hand(reward.model, tokenizer, "a" * 128), abs=1e-5)
    assert isinstance(long, FailedReward) and "129" in long.text and "128" in long.text
    tokenizer.model_max_length = 100  # where the tokenizer says less than the config
    assert isinstance(ModelReward(make_model(), tokenizer, "decoder").score(["a" * 101])[0], FailedReward)
