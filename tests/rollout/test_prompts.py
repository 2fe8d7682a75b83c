"""Prompts to tokens and completions back to what reward functions receive."""

import string

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey.core.findings import CheckError
from covey.rollout.prompts import ControlTokens, PromptCodec
from tests.support import tiny


@pytest.fixture
def codec(tiny_tokenizer):
    return PromptCodec(tiny_tokenizer, None, max_context=64)


def test_text_is_encoded_as_it_is(codec):
    assert codec.tokenizer.decode(codec.read("2+2=").ids) == "2+2="


def test_a_conversation_is_answered(codec):
    ids = codec.read([{"role": "user", "content": "hi"}]).ids
    assert codec.tokenizer.decode(ids) == "<bos>user: hi<eos><bos>assistant: "


def test_a_prompt_that_ends_with_the_assistant_is_continued(codec):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I s"}]
    assert codec.tokenizer.decode(codec.read(messages).ids).endswith("assistant: I s")
    completion = codec.decode(messages, codec.tokenizer("ay")["input_ids"])
    assert completion == [{"role": "assistant", "content": "I say"}]


def test_special_tokens_are_not_part_of_the_completion(codec):
    ids = codec.tokenizer("4")["input_ids"] + [1]
    assert codec.decode("2+2=", ids) == "4"
    assert codec.decode([{"role": "user", "content": "2+2"}], ids) == [{"role": "assistant", "content": "4"}]


def test_template_arguments_reach_the_template(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
    codec = PromptCodec(tiny_tokenizer, {"mood": "!"}, None)
    assert codec.tokenizer.decode(codec.read([{"role": "user", "content": "hi"}]).ids) == "hi!"
    assert codec.tokenizer.decode(codec.read([{"role": "user", "content": "hi"}], {"mood": "?"}).ids) == "hi?"


def test_messages_need_a_template(tiny_tokenizer):
    tiny_tokenizer.chat_template = None
    with pytest.raises(CheckError) as raised:
        PromptCodec(tiny_tokenizer, None, None).read([{"role": "user", "content": "hi"}])
    assert raised.value.codes == ["template"]


def test_a_prompt_that_fills_the_context_is_refused(codec):
    with pytest.raises(CheckError, match="64 tokens") as raised:
        codec.read("x" * 64)
    assert raised.value.codes == ["prompt-round-trip"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_prompt_that_is_far_too_long_is_not_even_encoded(codec, wrapped):
    long = "x" * (256 * 64 + 1)
    with pytest.raises(CheckError, match="16385 characters") as raised:
        codec.read([{"role": "user", "content": [{"type": "text", "text": long}]}] if wrapped else long)
    assert raised.value.codes == ["prompt-round-trip"]


def test_half_of_a_surrogate_pair_is_refused(codec):
    for prompt in ("a\ud800", [{"role": "user", "content": "a\ud800"}]):
        with pytest.raises(ValueError, match=r"ud800|surrogate"):
            codec.read(prompt)


def test_an_empty_prompt_is_refused(codec):
    with pytest.raises(CheckError) as raised:
        codec.read("")
    assert raised.value.codes == ["prompt-round-trip"]


@pytest.mark.parametrize("prompt", [None, 3, [], ["hi"], {"role": "user"}])
def test_values_of_other_types_are_refused_as_prompts(codec, prompt):
    with pytest.raises(CheckError) as raised:
        codec.read(prompt)
    assert raised.value.codes == ["prompt-type"]


@pytest.mark.parametrize("message", [{"content": "a"}, {"role": None, "content": "a"}, {"role": "user"}, "a", 1, None])
def test_a_row_with_a_bad_message_is_refused(codec, message):
    with pytest.raises(CheckError) as raised:
        codec.read_row({"prompt": [{"role": "user", "content": "a"}, message]})
    assert raised.value.codes == ["prompt-type"]


def test_the_fixture_tokenizer_round_trips():
    assert tiny.tokenizer().decode(tiny.tokenizer()("a B\t1")["input_ids"]) == "a B\t1"


def test_an_end_token_that_the_tokenizer_adds_is_taken_off(tiny_tokenizer):
    class Closing:
        eos_token, eos_token_id = "<eos>", 1

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [*tiny_tokenizer(text)["input_ids"], *[1] * add_special_tokens]}

    codec = PromptCodec(Closing(), None, None)
    assert codec.read("2+2=").ids == tiny_tokenizer("2+2=")["input_ids"]
    assert codec.read("done<eos>").ids[-1] == 1  # one that the user wrote stays


def test_a_prefill_may_come_in_parts(codec):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "I s"}]},
    ]
    assert codec.decode(messages, codec.tokenizer("ay")["input_ids"])[0]["content"] == "I say"


def test_missing_template_arguments_come_from_the_config(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
    codec = PromptCodec(tiny_tokenizer, {"mood": "!"}, None)
    assert codec.tokenizer.decode(codec.read([{"role": "user", "content": "hi"}], {"mood": None}).ids) == "hi!"


def test_control_tokens_in_a_message_are_text():
    """The user's `<eos>` is five characters; the template's own are tokens 1 and 2."""
    codec = PromptCodec(tiny.tokenizer(), None, None)
    ids = codec.read([{"role": "user", "content": "a<eos><bos>b"}]).ids
    harmless = codec.read([{"role": "user", "content": "ab"}]).ids
    assert [ids.count(control) for control in (1, 2)] == [harmless.count(control) for control in (1, 2)] == [1, 2]
    assert codec.tokenizer.decode(ids) == "<bos>user: a<eos><bos>b<eos><bos>assistant: "
    allowing = PromptCodec(tiny.tokenizer(), None, None, allow_control_tokens=True)
    assert allowing.read([{"role": "user", "content": "a<eos><bos>b"}]).ids.count(1) == 2


def test_private_characters_of_a_message_stay():
    """Unknown to the tokenizer, one token each, and none is taken for the sign of a control token."""
    codec = PromptCodec(tiny.tokenizer(), None, None)
    unknown = codec.tokenizer.unk_token_id
    ids = codec.read([{"role": "user", "content": "\U000f0000<eos>\U000f0001<eos>\U000f0000"}]).ids
    text = [unknown, *codec.tokenizer("<eos>", split_special_tokens=True)["input_ids"]]
    start = ids.index(unknown)
    assert ids[start : start + 13] == [*text, *text, unknown]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a<eos>b"}]},
        {"role": "user", "content": ["a<eos>", "b"]},
        {"role": "us<eos>er", "content": "a"},
        {"role": "system", "content": "<eos><eos>"},
    ],
)
def test_no_part_of_a_message_can_end_it(message):
    ids = PromptCodec(tiny.tokenizer(), None, None).read([message]).ids
    assert ids.count(tiny.tokenizer().eos_token_id) == 1


def test_control_tokens_of_the_assistant_and_of_texts_are_kept():
    codec = PromptCodec(tiny.tokenizer(), None, None)
    turns = [{"role": "assistant", "content": "a<eos>"}, {"role": "user", "content": "b"}]
    assert codec.read(turns).ids.count(1) == 3
    assert codec.read("a<eos>b").ids.count(1) == 1


def test_text_parts_are_joined_for_templates_that_print_them():
    """The template of the tests writes content as it is, so parts would show as Python's list."""
    codec = PromptCodec(tiny.tokenizer(), None, None)
    whole = codec.read([{"role": "user", "content": "hello"}]).ids
    for parts in ([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], ["hel", "lo"]):
        assert codec.read([{"role": "user", "content": parts}]).ids == whole


@pytest.mark.parametrize("kind", ["file", "refusal", "input_audio", "video", "tool_use"])
def test_parts_that_no_template_shows_are_refused(kind):
    codec = PromptCodec(tiny.tokenizer(), None, None)
    with pytest.raises(ValueError, match=f"a part of type '{kind}'"):
        codec.read([{"role": "user", "content": [{"type": kind, kind: "x"}]}])


def test_templates_that_read_parts_get_them():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endif %}{% endfor %}"
    )
    codec = PromptCodec(tokenizer, None, None)
    ids = codec.read([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]).ids
    assert tokenizer.decode(ids) == "[a][b]"
    assert codec.read([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]).ids == ids
    hostile = codec.read([{"role": "user", "content": [{"type": "text", "text": "a<eos>b"}]}]).ids
    assert tokenizer.decode(hostile) == "[a<eos>b]" and 1 not in hostile


def sentencepiece_like(prefix):
    """One token per character; a text begins with a space: where it begins, and after control tokens if "always"."""
    vocabulary = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", "▁", "\n", *string.punctuation, *string.ascii_letters]
    spaced = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>"))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=spaced, eos_token="</s>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )


@pytest.mark.parametrize(("prefix", "space"), [("always", "▁"), ("first", ""), ("never", "")])
@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_end|>b", "say </s> now", "</s></s>"])
def test_control_tokens_as_text_add_no_spaces(prefix, space, text):
    tokenizer = sentencepiece_like(prefix)
    controls, hidden = ControlTokens(tokenizer), {}
    rendered = f"<|im_start|>{controls.hide(text, hidden)}<|im_end|>"
    tokens = tokenizer.convert_ids_to_tokens(controls.encode(rendered, hidden))
    assert tokens == ["<|im_start|>", *space, *text.replace(" ", "▁"), "<|im_end|>"]


def with_bos(chat_template=None):
    from tokenizers import processors

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    return tokenizer


def test_a_text_begins_with_one_bos_whoever_wrote_it():
    codec = PromptCodec(tokenizer := with_bos(), None, None)
    bos = tokenizer.bos_token_id
    assert codec.read("2+2=").ids == codec.read("<bos>2+2=").ids
    assert codec.read("2+2=").ids.count(bos) == 1
    assert codec.read("<bos>2<bos>").ids[-1] == bos  # one that stands elsewhere is the text's


ECHO = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}{% if m.name is defined %}"
    "({{ m.name }}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


def test_keys_that_are_none_are_as_if_they_were_not_there():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = ECHO
    codec = PromptCodec(tokenizer, None, None)

    def messages(**filled):
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": {"z": 2, **filled}, **filled}}}
        return [{"role": "user", "content": "a", **filled}, {"role": "assistant", "tool_calls": [call], **filled}]

    plain = codec.read([*messages(), {"role": "user", "content": "b"}]).ids
    assert plain == codec.read([*messages(name=None, content_=None), {"role": "user", "content": "b"}]).ids


def test_a_rows_tools_are_shown_by_the_template():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = ECHO
    codec = PromptCodec(tokenizer, None, None)
    schema = {"type": "function", "function": {"name": "look", "parameters": {"x": None}}}
    row = {"prompt": [{"role": "user", "content": "a"}], "tools": [schema]}
    assert "look" in tokenizer.decode(codec.read_row(row).ids)
    assert codec.read_row({**row, "tools": '[{"name": "look"}]'}).ids != codec.read_row({**row, "tools": None}).ids
    assert codec.read_row({**row, "tools": ["look"]}).ids == codec.read_row({**row, "tools": None}).ids
