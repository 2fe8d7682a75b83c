"""What is found out about chat templates, and what is made of hostile results.

That conversations grow by the tokens which the template would have written is in `test_masks.py`.
"""

import json
import warnings
from dataclasses import replace

import pytest

from covey.rollout.prompts import PromptCodec
from covey.rollout.tools.turn_template import TurnTemplate, TurnTemplates, keep_thinking, rewritten
from tests.support.families import FAMILIES, LLAMA3, QWEN, TOKENIZERS, tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}]


TURNS = {
    name: TurnTemplate(
        TOKENIZERS[name], TOOLS, [TOKENIZERS[name].convert_tokens_to_ids(token) for token in family.ends]
    )
    for name, family in FAMILIES.items()
}


def encode(name, text):
    return TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]


def render(name, messages):
    return TOKENIZERS[name].apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_can_do_is_found_out(name):
    turns = TURNS[name]
    assert (turns.result_role, turns.shows_tools, turns.reasons) == (
        FAMILIES[name].role,
        FAMILIES[name].shows_tools,
        [],
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_result_cannot_end_its_own_turn(name):
    """The control tokens of a hostile result are text: as many of each as in a harmless result."""
    tokenizer, family = TOKENIZERS[name], FAMILIES[name]
    control = {token: tokenizer.convert_tokens_to_ids(token) for token in (family.eos, *family.special, "<bos>")}
    hostile = "".join(f"{token}x" for token in control)

    def continuation(content, turns=TURNS[name]):
        return turns.continuation([{"role": "tool", "name": "t", "tool_call_id": "call00000", "content": content}])

    def counts(ids):
        return {token: ids.count(number) for token, number in control.items()}

    assert counts(continuation(hostile)) == counts(continuation("harmless"))
    assert tokenizer.decode(continuation(hostile)) == tokenizer.decode(continuation("harmless")).replace(
        "harmless", hostile
    )
    allowing = TurnTemplate(tokenizer, TOOLS, allow_control_tokens=True)
    assert counts(continuation(hostile, allowing)) == {
        token: count + 1 for token, count in counts(continuation("harmless", allowing)).items()
    }


def test_a_user_may_answer_too():
    text = TOKENIZERS["qwen"].decode(TURNS["qwen"].continuation([{"role": "user", "content": "And then?"}]))
    assert text == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def ipython(*contents):
    """Results as the Llama template shows them, and the generation prompt."""
    shown = [f"<|start_header_id|>ipython<|end_header_id|>\n\n{json.dumps(content)}<|eot_id|>" for content in contents]
    return "".join([*shown, "<|start_header_id|>assistant<|end_header_id|>\n\n"])


ALONE = LLAMA3.replace(  # nor does it render results that do not follow a call
    "{% elif m.role == 'tool' %}",
    "{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
    "{% endif %}",
)


@pytest.mark.parametrize("template", [LLAMA3, ALONE])
def test_several_calls_are_answered_by_one_call_templates(template):
    tokenizer = tokenizer_of(FAMILIES["llama3"], template)
    turns = TurnTemplate(tokenizer, TOOLS)
    results = [{"role": "tool", "tool_call_id": f"call{i:05d}", "content": text} for i, text in enumerate("abc")]
    assert tokenizer.decode(turns.continuation(results)) == ipython("a", "b", "c")
    assert tokenizer.decode(turns.continuation(results[:1])) == ipython("a")


def test_a_user_can_follow_a_turn_without_calls():
    text = TOKENIZERS["llama3"].decode(TURNS["llama3"].continuation([{"role": "user", "content": "And?"}]))
    user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert text == f"{user}And?<|eot_id|>{assistant}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_off_gets_the_template_ending(name):
    """What the policy said until then, the ending and what follows are the conversation as rendered."""
    messages = [{"role": "user", "content": "2+2="}]
    said, asked = {"role": "assistant", "content": "It is, I th"}, {"role": "user", "content": "Be brief."}
    ids = encode(name, render(name, messages)) + encode(name, "It is, I th")
    ids += TURNS[name].ending() + TURNS[name].continuation([asked])
    assert ids == encode(name, render(name, [*messages, said, asked]))


def test_a_token_that_ends_a_turn_and_begins_results_comes_once():
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "4"}
    asks = TOKENIZERS["functiongemma"].convert_tokens_to_ids("<start_function_response>")
    ids = TURNS["functiongemma"].continuation([result], ended_with=asks)
    assert [asks, *ids] == TURNS["functiongemma"].continuation([result])
    assert TOKENIZERS["functiongemma"].decode(ids) == "response:f{value:<escape>4<escape>}<end_function_response>"
    qwen, end = TURNS["qwen"], TOKENIZERS["qwen"].eos_token_id
    assert qwen.continuation([result], ended_with=end) == qwen.continuation([result])


def test_templates_without_end_tokens_continue_after_the_turn():
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(FAMILIES["generic"], plain)
    ids = TurnTemplate(tokenizer).continuation([{"role": "tool", "content": "4"}])
    assert tokenizer.decode(ids) == "\ntool: 4\nassistant: "


def test_the_end_of_the_sequence_may_close_a_conversation():
    """Phi 3's template ends turns with one token, and a conversation without an answer to come with another."""
    family = replace(FAMILIES["generic"], eos="<|endoftext|>", special=["<|end|>"])
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}<|endoftext|>{% endif %}"
    )
    tokenizer = tokenizer_of(family, template)
    turns = TurnTemplate(tokenizer, [], [tokenizer.convert_tokens_to_ids("<|end|>")])
    ids = turns.continuation([{"role": "user", "content": "4"}])
    assert tokenizer.decode(ids) == "\nuser: 4<|end|>\nassistant: "


# --- templates that are not prefix-stable ------------------------------------------------------------------------

THINKING = QWEN.replace("{{ m.content }}{% for c", "{{ m.content.split('</think>')[-1] }}{% for c")
LAST_THINKS = QWEN.replace(
    "{{ m.content }}{% for c",
    "{{ m.content if loop.index0 >= messages | length - 2 else m.content.split('</think>')[-1] }}{% for c",
)
KEEPS_THINKING = QWEN.replace("{{ m.content }}{% for c", "{% set t = '</think>' %}{{ m.content }}{% for c")
FORGETS_WITH_A_USER = QWEN.replace(
    "{{ m.content }}{% for c",
    "{% set after = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ m.content.split('</think>')[-1] if after and m.role == 'assistant' else m.content }}{% for c",
)
COUNTS = QWEN.replace("# Tools", "# Tools, {{ messages | length }} messages so far")
GREETS = QWEN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nSure: {% endif %}")
NUMBERS = QWEN.replace("<tool_response>\n{{", "<tool_response>\n{{ loop.index }}: {{")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (THINKING, "it drops the thinking of earlier turns"),
        (LAST_THINKS, "it drops the thinking of earlier turns"),
        (COUNTS, r"a turn does not begin with the generation prompt: '1 messages so far.*' becomes '3 messages"),
        (GREETS, "a turn does not begin with the generation prompt: 'Sure: ' becomes"),
        (NUMBERS, "results are rendered differently later on: '3: .*' becomes '5: "),
    ],
)
def test_templates_that_are_not_prefix_stable_are_refused(template, reason):
    tokenizer = tokenizer_of(FAMILIES["qwen"], template)
    with pytest.raises(ValueError, match=f"(?s)not prefix-stable: {reason}.*unstable_chat_template='keep'"):
        TurnTemplate(tokenizer, TOOLS)
    kept = TurnTemplate(tokenizer, TOOLS, unstable="keep")
    assert len(kept.reasons) >= 1
    text = tokenizer.decode(kept.continuation([{"role": "tool", "content": "4"}]))
    assert "<tool_response>" in text
    assert "</tool_response><|im_end|>\n<|im_start|>assistant\n" in text


def test_dropped_thinking_after_a_user_is_warned_of_once():
    """Qwen3's template keeps the thinking while tools answer, and drops it when a user continues."""
    tokenizer = tokenizer_of(FAMILIES["qwen"], FORGETS_WITH_A_USER)
    turns, kept = TurnTemplate(tokenizer, TOOLS), TurnTemplate(tokenizer, TOOLS, unstable="keep")
    said = [{"role": "user", "content": "Again."}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turns.continuation([{"role": "tool", "content": "4"}])
        kept.continuation(said)
    with pytest.warns(UserWarning, match="where a user continues: it drops the thinking of earlier turns"):
        ids = turns.continuation(said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert turns.continuation(said) == ids
        TurnTemplate(tokenizer_of(FAMILIES["qwen"], KEEPS_THINKING), TOOLS).continuation(said)


def test_a_template_that_keeps_thinking_is_stable():
    assert TurnTemplate(tokenizer_of(FAMILIES["qwen"], KEEPS_THINKING), TOOLS).reasons == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has none"),
        (
            "{% for m in messages %}{% if m.role != 'tool' and loop.first %}{{ m.content }}{% endif %}{% endfor %}",
            "does not render",
        ),
        ("{{ raise_exception('never') }}", "does not render the results of tools: .*never"),
        ("{% if %}", "does not render the results of tools: .*TemplateSyntaxError"),
    ],
)
def test_a_template_without_use_is_refused(template, message):
    tokenizer = tokenizer_of(FAMILIES["qwen"])
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        TurnTemplate(tokenizer, TOOLS)


def test_image_parts_of_results_are_refused_text_parts_are_not():
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = TURNS["qwen"].continuation([{"role": "tool", "content": "a\nb"}])
    assert TURNS["qwen"].continuation([{"role": "tool", "content": text}]) == joined
    with pytest.raises(ValueError, match="images among the results of tools need a vision-language model"):
        TURNS["qwen"].continuation([{"role": "tool", "content": [{"type": "image", "image": None}]}])


AFTER_THE_USER = (
    "{% set ns = namespace(last_user_index=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last_user_index = loop.index0 %}{% endif %}{% endfor %}"
)
SPLIT = "m.content.split('</think>')[-1]"


def forgetful(condition):
    """Drops thinking before the last user's message, unless `condition` holds."""
    said = f"{{{{ m.content if m.role != 'assistant' or {condition} else {SPLIT} }}}}"
    return AFTER_THE_USER + QWEN.replace("{{ m.content }}{% for c", said + "{% for c")


@pytest.mark.parametrize(
    "condition",
    [
        "loop.index0 > ns.last_user_index",
        "preserve_thinking is true or loop.index0 > ns.last_user_index",
        "not (truncate_history_thinking | default(true) and loop.index0 < ns.last_user_index)",
    ],
)
def test_a_template_is_rewritten_to_keep_thinking(condition):
    tokenizer, asked = tokenizer_of(FAMILIES["qwen"], forgetful(condition)), {"role": "user", "content": "Again."}
    said = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    with pytest.warns(UserWarning, match="where a user continues: it drops the thinking"):
        TurnTemplate(tokenizer, TOOLS).continuation([asked])
    opening = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    templates = TurnTemplates(PromptCodec(tokenizer, None, None), [], "rewrite")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = templates.of(TOOLS, None).continuation([asked])
    assert tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True) == opening
    whole = tokenizer.apply_chat_template([asked, said, asked], tokenize=False, add_generation_prompt=True)
    assert whole == opening + said["content"] + "<|im_end|>" + tokenizer.decode(ids)


def test_a_rewritten_template_shows_the_same_first_turn():
    asks = "{{ '' if loop.index0 > ns.last_user_index else '?' }}"
    before = AFTER_THE_USER + QWEN.replace("{{ m.content }}{% for c", "{{ m.content }}" + asks + "{% for c")
    tokenizer = tokenizer_of(FAMILIES["qwen"], before)
    with pytest.raises(ValueError, match="would change what this chat template writes for the first turn"):
        keep_thinking(tokenizer)
    assert tokenizer.chat_template == before


def without_thinking(kept):
    """Qwen 3's way: an empty thought opens a turn with `enable_thinking=False`, and earlier turns lose theirs."""
    said = (
        "{% if m.role == 'assistant' and loop.index0 > ns.last_query_index and ("
        + kept
        + ") %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    )
    after = AFTER_THE_USER.replace("last_user_index", "last_query_index")
    opening = (
        "assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    template = after + QWEN.replace("{{ m.content }}{% for c", said + "{% for c")
    return template.replace("assistant\n{% endif %}", opening + "{% endif %}")


LAST = "loop.last or (not loop.last and reasoning_content)"


def test_empty_thoughts_are_kept_without_being_asked_for():
    tokenizer = tokenizer_of(FAMILIES["qwen"], without_thinking(LAST))
    off = {"enable_thinking": False}
    asked = {"role": "user", "content": "Add."}
    opening = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True, **off)
    templates = TurnTemplates(PromptCodec(tokenizer, off, None), [])
    with pytest.warns(UserWarning, match="was rewritten to keep it"):
        assert templates.of(TOOLS, None).reasons == []
    assert tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True, **off) == opening
    kept = TurnTemplate(tokenizer_of(FAMILIES["qwen"], without_thinking(LAST)), TOOLS, (), off, "keep")
    said = [{"role": "tool", "name": "add", "content": "5"}]
    assert templates.of(TOOLS, None).continuation(said) == kept.continuation(said)  # no token differs


def test_a_template_that_rewriting_does_not_help_stays_as_it_was():
    tokenizer = tokenizer_of(FAMILIES["qwen"], without_thinking("loop.last"))
    before = tokenizer.chat_template
    templates = TurnTemplates(PromptCodec(tokenizer, {"enable_thinking": False}, None), [])
    with pytest.raises(ValueError, match="not prefix-stable"):
        templates.of(TOOLS, None)
    assert tokenizer.chat_template == before


def test_rewriting_is_done_once_and_helps_thinking_alone():
    once = rewritten("{{ preserve_thinking }}")
    assert rewritten(once) == once != "{{ preserve_thinking }}"
    with pytest.raises(ValueError, match="'rewrite' does not help here: change"):
        TurnTemplate(tokenizer_of(FAMILIES["qwen"], COUNTS), TOOLS, unstable="rewrite")


def test_an_unknown_word_for_unstable_is_refused():
    with pytest.raises(ValueError, match="choose 'raise', 'keep' or 'rewrite'"):
        TurnTemplate(TOKENIZERS["qwen"], unstable="maybe")
