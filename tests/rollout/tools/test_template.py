"""Conversations with tools grow by tokens, over chat templates in the style of the families."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from covey.rollout.tools.template import TurnTemplate

few = settings(max_examples=40, deadline=None, derandomize=True)

QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if loop.index0 == 0 and tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
    "{% else %}<｜Assistant｜>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}\n"
    "```json\n{{ c.function.arguments + '' }}\n```"
    "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GENERIC = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}\n{% endfor %}"
    # A line break before the content: a generation prompt that ends in a space would merge with the first word.
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and how an assistant's turn is rendered by it."""

    template: str
    eos: str
    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    arguments: type = dict
    role: str = "tool"
    shows_tools: bool = True
    calls: int = 3


FAMILIES = {
    "qwen": Family(QWEN, "<|im_end|>", ("<|im_start|>",)),
    "llama3": Family(LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), calls=1),
    "mistral": Family(MISTRAL, "</s>", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "gemma": Family(
        GEMMA, "<eos>", ("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), role="user", shows_tools=False
    ),
    "deepseek": Family(
        DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"), arguments=str
    ),
    "generic": Family(GENERIC, "<|endoftext|>"),
}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}]


def tokenizer_of(family, template=None):
    """Byte pairs learnt on a little text, so that tokens do merge over the boundaries of messages if they may."""
    control = ["<bos>", family.eos, *family.special]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=control, show_progress=False
    )
    made.train_from_iterator([family.template, "user\nthe answer is 4\n\nassistant\n ", GENERIC * 2], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token=family.eos)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in family.special])
    tokenizer.chat_template = template or family.template
    return tokenizer


TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
TURNS = {
    name: TurnTemplate(
        TOKENIZERS[name], TOOLS, [TOKENIZERS[name].convert_tokens_to_ids(token) for token in family.ends]
    )
    for name, family in FAMILIES.items()
}


def encode(name, text):
    return TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]


def render(name, messages, answer=True):
    return TOKENIZERS[name].apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=answer)


def assistant(name, text, calls):
    """An assistant's message as the template wants it, with calls where it knows them."""
    family = FAMILIES[name]
    message = {"role": "assistant", "content": text}
    if family.role == "tool" and name != "generic" and calls:
        arguments = {"q": text} if family.arguments is dict else json.dumps({"q": text})
        message["tool_calls"] = [
            {"type": "function", "id": f"call{i:05d}", "function": {"name": "lookup", "arguments": arguments}}
            for i in range(calls)
        ]
    return message


def sampled_text(name, before, message):
    """What a policy that follows the template writes: from the generation prompt to the end of its turn."""
    prompt, whole = render(name, before), render(name, [*before, message], answer=False)
    assert whole.startswith(prompt)
    end = (FAMILIES[name].ends or (FAMILIES[name].eos,))[0]
    return whole[len(prompt) : whole.rindex(end) + len(end)]


def shown(name, results):
    """The results as messages that the template itself can render."""
    if FAMILIES[name].role == "tool":
        return results
    return [{"role": "user", "content": "\n".join(f"```tool_output\n{r['content']}\n```" for r in results)}]


# Without control tokens, and without white space at the ends, which some templates trim.
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]｜"), max_size=12).map(str.strip)
texts = st.lists(words, max_size=3).map("\n".join).map(str.strip)
rounds = st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", FAMILIES)
@given(question=texts, conversation=rounds)
@few
def test_sampled_and_tool_tokens_concatenated_equal_the_rendered_conversation(name, question, conversation):
    messages = [{"role": "user", "content": question}]
    ids = encode(name, render(name, messages))
    for text, outputs in conversation:
        outputs = outputs[: FAMILIES[name].calls]
        message = assistant(name, text, len(outputs))
        results = [
            {"role": "tool", "name": "lookup", "tool_call_id": f"call{i:05d}", "content": output}
            for i, output in enumerate(outputs)
        ]
        ids += encode(name, sampled_text(name, messages, message))
        ids += TURNS[name].continuation(results)
        messages += [message, *shown(name, results)]
        assert ids == encode(name, render(name, messages))


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

    def counts(content):
        ids = TURNS[name].continuation([{"role": "tool", "name": "t", "tool_call_id": "call00000", "content": content}])
        return {token: ids.count(number) for token, number in control.items()}

    assert counts(hostile) == counts("harmless")


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
ASKS_WHETHER = LLAMA3.replace("{% if m.tool_calls %}", "{% if 'tool_calls' in m %}")


@pytest.mark.parametrize("template", [LLAMA3, ALONE, ASKS_WHETHER])
def test_a_template_of_one_call_a_turn_answers_several_all_the_same(template):
    tokenizer = tokenizer_of(FAMILIES["llama3"], template)
    turns = TurnTemplate(tokenizer, TOOLS)
    results = [{"role": "tool", "tool_call_id": f"call{i:05d}", "content": text} for i, text in enumerate("abc")]
    assert tokenizer.decode(turns.continuation(results)) == ipython("a", "b", "c")
    assert tokenizer.decode(turns.continuation(results[:1])) == ipython("a")


def test_a_template_that_asks_whether_there_are_calls_renders_a_user_after_a_turn_without_any():
    tokenizer = tokenizer_of(FAMILIES["llama3"], ASKS_WHETHER)
    text = tokenizer.decode(TurnTemplate(tokenizer, TOOLS).continuation([{"role": "user", "content": "And?"}]))
    user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert text == f"{user}And?<|eot_id|>{assistant}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_off_is_ended_as_the_template_ends_it(name):
    """What the policy said until then, the ending and what follows are the conversation as rendered."""
    messages = [{"role": "user", "content": "2+2="}]
    said, asked = {"role": "assistant", "content": "It is, I th"}, {"role": "user", "content": "Be brief."}
    ids = encode(name, render(name, messages)) + encode(name, "It is, I th")
    ids += TURNS[name].ending() + TURNS[name].continuation([asked])
    assert ids == encode(name, render(name, [*messages, said, asked]))


def test_a_template_that_does_not_end_turns_with_a_token_is_continued_after_the_policys_own_end():
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(FAMILIES["generic"], plain)
    ids = TurnTemplate(tokenizer).continuation([{"role": "tool", "content": "4"}])
    assert tokenizer.decode(ids) == "\ntool: 4\nassistant: "


# --- templates that are not prefix-stable ------------------------------------------------------------------------

THINKING = QWEN.replace("{{ m.content }}{% for c", "{{ m.content.split('</think>')[-1] }}{% for c")
LAST_THINKS = QWEN.replace(
    "{{ m.content }}{% for c",
    "{{ m.content if loop.index0 >= messages | length - 2 else m.content.split('</think>')[-1] }}{% for c",
)
KEEPS_THINKING = QWEN.replace("{{ m.content }}{% for c", "{% set t = '</think>' %}{{ m.content }}{% for c")
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
def test_a_template_that_is_not_prefix_stable_is_refused_with_the_reason(template, reason):
    tokenizer = tokenizer_of(FAMILIES["qwen"], template)
    with pytest.raises(ValueError, match=f"(?s)not prefix-stable: {reason}.*unstable_chat_template='keep'"):
        TurnTemplate(tokenizer, TOOLS)
    kept = TurnTemplate(tokenizer, TOOLS, unstable="keep")
    assert len(kept.reasons) >= 1
    text = tokenizer.decode(kept.continuation([{"role": "tool", "content": "4"}]))
    assert "<tool_response>" in text
    assert "</tool_response><|im_end|>\n<|im_start|>assistant\n" in text


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


def test_images_among_results_are_refused_and_parts_of_text_are_not():
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = TURNS["qwen"].continuation([{"role": "tool", "content": "a\nb"}])
    assert TURNS["qwen"].continuation([{"role": "tool", "content": text}]) == joined
    with pytest.raises(ValueError, match="images among the results of tools are not yet supported"):
        TURNS["qwen"].continuation([{"role": "tool", "content": [{"type": "image", "image": None}]}])


def test_an_unknown_word_for_unstable_is_refused():
    with pytest.raises(ValueError, match="choose 'raise' or 'keep'"):
        TurnTemplate(TOKENIZERS["qwen"], unstable="maybe")
