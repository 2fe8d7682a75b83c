"""Tool calls as the families write them: read back as written, and nothing else disturbs the reader."""

import json
import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from covey.rollout.tools.calls import AssistantTurn, ToolCall
from covey.rollout.tools.parsers import TOOL_PARSERS, parse_outside_thinking, parser_for, read_turn
from covey.rollout.tools.schema import from_text
from covey.rollout.tools.tool import Tool
from tests.support import tiny


def parse(family, text):
    return TOOL_PARSERS[family].parse(text)


# --- how each family writes calls --------------------------------------------------------------------------------


def python_literal(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_literal(k)}: {python_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def python_call(call):
    return f"{call.name}({', '.join(f'{k}={python_literal(v)}' for k, v in call.arguments.items())})"


def write_hermes(calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>" for c in calls
    )


def write_llama3(calls):
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def write_mistral_list(calls):
    return "[TOOL_CALLS] " + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])


def write_mistral_args(calls):
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def write_gemma(calls):
    return "```tool_code\n" + "\n".join(map(python_call, calls)) + "\n```"


def write_python_list(calls):
    return "[" + ", ".join(map(python_call, calls)) + "]"


def write_deepseek_v3(calls):
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{json.dumps(c.arguments)}\n```<｜tool▁call▁end｜>"
            for c in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def write_deepseek_v31(calls):
    return (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{json.dumps(c.arguments)}<｜tool▁call▁end｜>" for c in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def write_qwen3_coder(calls):
    def value(it):
        return it if isinstance(it, str) else json.dumps(it)

    return "\n".join(
        f"<tool_call>\n<function={c.name}>\n"
        + "".join(f"<parameter={key}>\n{value(it)}\n</parameter>\n" for key, it in c.arguments.items())
        + "</function>\n</tool_call>"
        for c in calls
    )


def write_glm(calls):
    def value(it):
        return it if isinstance(it, str) else json.dumps(it)

    return "\n".join(
        f"<tool_call>{c.name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value(it)}</arg_value>\n" for key, it in c.arguments.items())
        + "</tool_call>"
        for c in calls
    )


def gemma_value(it, quote):
    if isinstance(it, dict):
        return "{" + ",".join(f"{quote}{key}{quote}:{gemma_value(one, quote)}" for key, one in it.items()) + "}"
    if isinstance(it, list):
        return "[" + ",".join(gemma_value(one, quote) for one in it) + "]"
    return f"{quote}{it}{quote}" if isinstance(it, str) else json.dumps(it)


def write_functiongemma(calls):
    def arguments(call):
        return ",".join(f"{key}:{gemma_value(it, '<escape>')}" for key, it in call.arguments.items())

    return "".join(f"<start_function_call>call:{c.name}{{{arguments(c)}}}<end_function_call>" for c in calls)


def write_gemma4(calls):
    marks = {"<start_function_call>": "<|tool_call>", "<end_function_call>": "<tool_call|>", "<escape>": '<|"|>'}
    text = write_functiongemma(calls)
    for one, other in marks.items():
        text = text.replace(one, other)
    return text


def write_json(calls):
    return " and ".join(json.dumps({"name": c.name, "arguments": c.arguments}, indent=1) for c in calls)


def write_fenced_json(calls):
    return f"```json\n{json.dumps([{'name': c.name, 'arguments': c.arguments} for c in calls])}\n```"


WRITERS = [
    ("hermes", write_hermes),
    ("llama3", write_llama3),
    ("llama3", lambda calls: "<|python_tag|>" + write_llama3(calls)),
    ("llama3", write_python_list),
    ("mistral", write_mistral_list),
    ("mistral", write_mistral_args),
    ("gemma", write_gemma),
    ("gemma", write_python_list),
    ("gemma", write_fenced_json),
    ("deepseek", write_deepseek_v3),
    ("deepseek", write_deepseek_v31),
    ("qwen3_coder", write_qwen3_coder),
    ("glm", write_glm),
    ("functiongemma", write_functiongemma),
    ("gemma4", write_gemma4),
    ("json", write_fenced_json),
]

names = st.text(string.ascii_letters + "_", min_size=1, max_size=8).filter(lambda s: s not in ("True", "False", "None"))
# Strings that hold what a careless reader would take for the end of a call.
texts = st.text(max_size=10) | st.sampled_from(
    [
        '"',
        "\\",
        "}",
        "]}",
        "</tool_call>",
        "```",
        "[TOOL_CALLS]",
        "'''",
        "a\nb",
        "<tool_call>{",
        "é漢🙂",
        '{"name": "x"}',
        "</parameter>",
        "</function>",
        "<parameter=x>1",
        "5",
        "null",
    ]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls_of = st.lists(st.builds(ToolCall, names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3)
PLAIN = str.maketrans("", "", "`")  # fences in fenced notations cannot be told from their end


@pytest.mark.parametrize(("family", "write"), WRITERS)
@given(calls=calls_of)
def test_calls_are_read_as_they_were_written(family, write, calls):
    if "```" in write([]) or family == "deepseek":
        calls = [ToolCall(c.name, json.loads(json.dumps(c.arguments).translate(PLAIN))) for c in calls]
    written = write(calls)
    turn = parse(family, written)
    assert turn.malformed == []
    assert [c.name for c in turn.calls] == [c.name for c in calls]
    assert [typed(read, c) for read, c in zip(turn.calls, calls, strict=True)] == [c.arguments for c in calls]
    assert turn.content == ""


TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def typed(read, written):
    """The arguments of a call; where the notation has no types, as a schema with the written ones' types says."""
    if read.texts is None:
        return read.arguments
    schema = {key: {"type": TYPES.get(type(it), "null")} for key, it in written.arguments.items()}
    return {key: from_text(text, schema[key]) for key, text in read.texts.items()}


@pytest.mark.parametrize(("family", "write"), [w for w in WRITERS if w[0] != "llama3" and w[1] != write_python_list])
def test_text_around_calls_is_content(family, write):
    calls = [ToolCall("add", {"a": 1, "b": [2]})]
    turn = parse(family, f"I add.\n{write(calls)}")
    assert (turn.content, turn.calls, turn.malformed) == ("I add.", calls, [])


def test_llamas_content_stands_before_the_tag():
    turn = parse("llama3", '  Let me see.<|python_tag|>{"name": "f", "parameters": {}}')
    assert turn == AssistantTurn("Let me see.", [ToolCall("f", {})])


@pytest.mark.parametrize("family", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", ["", "4", "The answer is {x}.", "I said [1, 2].", '{"answer": 4}', "```python\nf(1)\n```"]
)
def test_a_turn_without_calls_is_content(family, text):
    assert parse(family, text) == AssistantTurn(text)


THINKERS = ["hermes", "mistral", "deepseek", "qwen3_coder", "glm", "functiongemma", "gemma4", "json"]


@pytest.mark.parametrize("family", THINKERS)
def test_thinking_about_a_call_is_no_call(family):
    write = dict(WRITERS)[family]
    thought, said = [ToolCall("no", {})], [ToolCall("yes", {"x": 1})]
    turn = parse(family, f"<think>{write(thought)}</think>{write(said)}")
    assert turn.calls == said
    assert turn.content.startswith("<think>")
    assert parse(family, f"<think>{write(thought)}").calls == []
    assert parse(family, f"{write(thought)}</think>{write(said)}").calls == said  # the prompt opened the thinking


def test_mistral_thinks_between_marks_of_its_own():
    tokenizer = tiny.tokenizer()
    marks = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    thought, call = "[THINK]or [TOOL_CALLS]no[ARGS]{}?[/THINK]", "[TOOL_CALLS]yes[ARGS]{}"
    ids = tokenizer(thought + call, add_special_tokens=False)["input_ids"]
    turn = read_turn(tokenizer, [*ids, tokenizer.eos_token_id], TOOL_PARSERS["mistral"])
    assert turn == AssistantTurn(thought, [ToolCall("yes", {})])
    assert parse("mistral", "[THINK][TOOL_CALLS]no[ARGS]{}").calls == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "VvvODy9mT"}, {"name": "f", "arguments": {}}]', True),
        ("[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{}[TOOL_CALLS]f[ARGS]{}", True),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "<s>"}, {"name": "f", "arguments": {}, "id": 1}]', False),
    ],
)
def test_mistral_names_its_calls(text, named):
    assert [call.call_id for call in parse("mistral", text).calls] == ["VvvODy9mT" if named else None, None]


def test_brackets_in_llamas_prose_are_no_calls():
    assert parse("llama3", "[1, 2] and [see f(a=1)]") == AssistantTurn("[1, 2] and [see f(a=1)]")
    assert "by name" in parse("llama3", "[f(1)]").malformed[0].reason


def test_a_broken_call_of_glm_does_not_hide_the_next_one():
    broken = "<tool_call>f<arg_key>a</arg_key>1</tool_call>"
    turn = parse("glm", f"So: {broken} and <tool_call>g</tool_call><tool_call>h")
    assert (turn.content, turn.calls) == ("So:  and", [ToolCall("g", {}), ToolCall("h", {})])
    assert [bad.text for bad in turn.malformed] == [broken]


def test_builtin_tools_of_llama_are_called_in_python_notation():
    turn = parse("llama3", '<|python_tag|>brave_search.call(query="who, \\"exactly\\"?")')
    assert turn.calls == [ToolCall("brave_search", {"query": 'who, "exactly"?'})]


def test_gemma_may_print_or_assign_the_result():
    turn = parse("gemma", "```tool_code\nprint(f(a=-1.5e3, b=('x', None)))\nr = g(c={'k': True})\n```")
    assert turn.calls == [ToolCall("f", {"a": -1500.0, "b": ["x", None]}), ToolCall("g", {"c": {"k": True}})]


def test_arguments_as_json_string_and_calls_below_function():
    value = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert parse("json", json.dumps(value)).calls == [ToolCall("f", {"a": 1})]


def test_a_missing_closing_mark_is_forgiven():
    one = '<tool_call>{"name": "f", "arguments": {}}'
    assert parse("hermes", one).calls == [ToolCall("f", {})]
    assert len(parse("hermes", one + "\n" + one).calls) == 2


def test_a_broken_call_does_not_hide_the_next_one():
    turn = parse("hermes", '<tool_call>{"name": "f"</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>')
    assert turn.calls == [ToolCall("g", {})]
    assert [bad.text for bad in turn.malformed] == ['{"name": "f"']


def test_qwen3_coder_may_leave_out_what_stands_around_a_function():
    function = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    for text in (function, f"{function}\n</tool_call>", f"<tool_call>{function}", function.removesuffix("</function>")):
        assert parse("qwen3_coder", text) == AssistantTurn("", [ToolCall("f", {"a": 1})])
    both = parse("qwen3_coder", f"<tool_call>\n{function}\n{function}\n</tool_call>")
    assert both == AssistantTurn("", [ToolCall("f", {"a": 1})] * 2)


def test_a_broken_call_of_qwen3_coder_does_not_hide_the_next_one():
    turn = parse("qwen3_coder", "<tool_call><function=f>{}</function></tool_call><tool_call><function=g></function>")
    assert turn.calls == [ToolCall("g", {})]
    assert [bad.text for bad in turn.malformed] == ["<tool_call><function=f>{}</function></tool_call>"]


def test_only_outer_line_breaks_of_a_value_are_layout():
    turn = parse("qwen3_coder", "<function=f><parameter=code>\n\nif x:\n    y\n\n</parameter></function>")
    assert turn.calls[0].texts == {"code": "\nif x:\n    y\n"}
    for empty in ("", "\n", "\n\n"):
        turn = parse("qwen3_coder", f"<function=f><parameter=a>{empty}</parameter></function>")
        assert turn.calls[0].arguments == {"a": ""}


def test_the_token_that_begins_gemma_results_is_no_content():
    text = "I look.<start_function_call>call:f{}<end_function_call><start_function_response>"
    assert parse("functiongemma", text) == AssistantTurn("I look.", [ToolCall("f", {})])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("five", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five"),
        ("1.5", {"type": ["integer", "string"]}, "1.5"),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("None", {"type": "integer", "nullable": True}, None),
        ("5", {"type": "string", "nullable": True}, "5"),
        (" True\n", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ('"a"', {"type": "string"}, '"a"'),
        ('"a"', {}, '"a"'),
        ('["a"]', {}, ["a"]),
        ("[a]", {"type": "array"}, "[a]"),
        ("NaN", {"type": "number"}, "NaN"),
    ],
)
def test_a_text_without_a_type_is_what_the_schema_asks_for(text, schema, value):
    read = from_text(text, schema)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("hermes", "<tool_call>add 1 and 2</tool_call>", "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "no JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no 'name'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object .* not a list"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments of f are no JSON"),
        ("hermes", '<tool_call>["f"]</tool_call>', "must be a JSON object with 'name'.* not a string"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "digits"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 99}{"]" * 99}}}}}</tool_call>', "too deeply"),
        ("hermes", f'<tool_call>{{"a": {"[" * 9999}{"]" * 9999}}}</tool_call>', "too deeply"),
        ("llama3", '{"name": "f", "parameters": {"a": 1}', "neither a JSON object"),
        ("llama3", "<|python_tag|>import os", "neither a JSON object"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"', "not closed"),
        ("mistral", "[TOOL_CALLS]f(1)", "no arguments in braces"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', "not closed"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{a}", "no JSON"),
        ("gemma", "```tool_code\nf(1)\n```", "by name"),
        ("gemma", "```tool_code\nf(a=1+1)\n```", "expected '\\)', found '\\+1'|cannot read"),
        ("gemma", "```tool_code\nf(a=g(b=1))\n```", "expressions are not computed"),
        ("gemma", f"```tool_code\nf(a={'[' * 99})\n```", "too deeply"),
        ("gemma", "```tool_code\nf(a='\\ud800')\n```", "is not a character"),
        ("gemma", "```tool_code\nf(a='''x\n```", "not closed|ends"),
        ("deepseek", "<｜tool▁call▁begin｜>f {}<｜tool▁call▁end｜>", "there is no"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>", "arguments of f are no JSON"),
        ("qwen3_coder", "<tool_call>f(1)</tool_call>", "there is no <function=name>"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "there is no <function=name>"),
        ("qwen3_coder", "<function=f><parameter=a>1", "argument a is not closed by </parameter>"),
        ("qwen3_coder", "<function=f>a=1</function>", "only <parameter=name>value</parameter> may stand"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "does not begin with the name"),
        ("glm", "<tool_call>f(1)<arg_value>1</arg_value></tool_call>", "only <arg_key>name</arg_key><arg_value>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "argument a is not closed by </arg_value>"),
        ("functiongemma", "<start_function_call>f{}<end_function_call>", "does not begin with call:name{"),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x", "string is not closed by <escape>"),
        ("functiongemma", "<start_function_call>call:f{a:Paris}", "a string stands between <escape> and <escape>"),
        ("functiongemma", "<start_function_call>call:f{a:1", "arguments are not closed"),
        ("functiongemma", "<start_function_call>call:f{a:1 b:2}", 'Expecting \',\' delimiter.* of {"a":1"b":2}'),
        ("functiongemma", "<start_function_call>call:f{1}", "Expecting property name .* of {1}"),
        ("functiongemma", "<start_function_call>call:f{} g{}<end_function_call>", "something follows .*'g{}'"),
        ("functiongemma", "<start_function_call>call:f{a:" + "[" * 99, "nested too deeply"),
        ("gemma4", '<|tool_call>call:f{<|"|>a<|"|>}<tool_call|>', "Expecting ':' delimiter.* of {\"a\"}"),
        ("gemma4", "<|tool_call>call:f{a:01}", "cannot read '01}'"),
        ("json", 'Sure: {"name": "f", "arguments": {"a": 1', "not closed"),
        ("json", '{"name": "f", "arguments": {"a": 1,}}', "no JSON"),
    ],
)
def test_what_cannot_be_read_is_malformed_and_says_why(family, text, reason):
    turn = parse(family, text)
    assert turn.calls == []
    assert len(turn.malformed) == 1
    assert re.search(reason, turn.malformed[0].reason)
    assert turn.asks


# --- hostile text ------------------------------------------------------------------------------------------------

PIECES = [
    *[
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "```",
        "```json\n",
    ],
    *["```tool_code\n", "\n", " ", "{", "}", "[", "]", '"', "'", "'''", '"""', "\\", ":", ",", ";", "(", ")", "=", "-"],
    *["name", '{"name": "f"', '"arguments"', "f(", "a=", "print(", "1", "1e999", "é", "\0", "\ud800", "null", "NaN"],
    *[
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁calls▁begin｜>",
        '{"name": "f", "arguments": {}}',
    ],
    *["<function=", "<function=f>", "</function>", "<parameter=", "<parameter=a>", "</parameter>", ">"],
    *["<start_function_call>", "<end_function_call>", "<escape>", "call:f{", "a:", "<start_function_response>"],
    *["<|tool_call>", "<tool_call|>", '<|"|>'],
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
]


@pytest.mark.parametrize("family", TOOL_PARSERS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_no_text_raises_and_every_call_has_a_name_and_arguments(family, pieces):
    turn = parse(family, "".join(pieces))
    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in turn.calls)
    assert all(bad.reason for bad in turn.malformed)


HOSTILE = [
    *PIECES,
    *["{{", "[[", '{"', '["', '{"a":', '[{"', '"\\', "'\\", '\\"', "'''\\", '"""\\"', "<tool_call>{", '<tool_call>{"'],
    *[
        "<tool_call>{}",
        "<tool_call>{</tool_call>",
        "[TOOL_CALLS]{",
        "[TOOL_CALLS]f{",
        "[TOOL_CALLS][",
        "{ ",
        "[ {",
        "f(a=",
    ],
    *[
        '{"name": ',
        '{"name": "f", "arguments": ',
        "{};",
        "a=",
        "f();",
        "x.",
        "[f(",
        "```a",
        "``` ",
        '<｜tool▁call▁begin｜>f{"',
    ],
    *["<｜tool▁call▁begin｜>{}", '{"name":"f","arguments":{}} ', '<|python_tag|>{"', "```tool_code\nf(a='''"],
    *["<function=f><parameter=a>", "<function=f></function>", "</parameter>  ", "<parameter=a></parameter>", "a:1,"],
    *["<function=f", "<tool_call><function=f", "<start_function_call>call:f{a:<escape>", "a:[", "a:{", "[1,"],
    *["<tool_call>f<arg_key>a</arg_key><arg_value>", "<arg_key>a</arg_key><arg_value>1</arg_value>", "<tool_call>f "],
    *["<escape><start_function_call>call:f{a:<escape>,a:", "<start_function_call>{", "call:f{a:1"],
]
PREFIXES = [
    "",
    "```tool_code\nf(a=",
    "<tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    '{"name": "f", "arguments": ',
    "f(a='''",
    "<function=f><parameter=a>",
    "<start_function_call>call:f{",
]


def seconds(family, text):
    started = time.process_time()
    parse(family, text)
    return time.process_time() - started


@pytest.mark.slow
@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_time_grows_with_the_text_and_not_with_its_square(family):
    """Every hostile repetition at 4 times the length takes about 4 times as long, not 16.

    Anything under 0.003 s passes without comparing: it is fast enough.
    """
    for prefix in PREFIXES:
        for piece in HOSTILE:
            small, large = (prefix + piece * (size // len(piece)) for size in (1_250, 5_000))
            took = seconds(family, large)
            if took > 0.003:  # 0.05 s for 20,000 characters, if it grows with the square
                took = min(took, *(seconds(family, large) for _ in range(3)))
                assert took < 9 * max(seconds(family, small) for _ in range(3)), f"{prefix!r} + {piece!r} * n"


# --- choosing one, and tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ 'return a json object within <tool_call></tool_call> XML tags' }}", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|start_header_id|>' }}{{ 'Environment: ipython' }}{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '<start_of_turn>model' }}", "gemma"),
        ("{{ '<tool_call>\n<function=name>\n<parameter=key>' }}", "qwen3_coder"),
        ("{{ '<tool_call>{function-name}\n<arg_key>{key}</arg_key>' }}", "glm"),
        ("{{ '<start_of_turn>model\n<start_function_call>call:' }}", "functiongemma"),
        ("{{ '<|turn>model\n<|tool_call>call:' }}", "gemma4"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
        ("{{ '<|im_start|>' }}", "json"),
        (None, "json"),
        ({"default": "{{ '<|im_start|>' }}", "tool_use": "{{ '<tool_call>' }}"}, "hermes"),
        ({"default": "{{ '[TOOL_CALLS]' }}"}, "mistral"),
    ],
)
def test_the_chat_template_tells_which_notation_is_used(template, family):
    assert parser_for(template) == family


def test_an_unknown_parser_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"unknown tool parser 'hermis'; did you mean 'hermes'\? Known: .*mistral"):
        TOOL_PARSERS["hermis"]


def test_only_special_tokens_of_the_notation_are_decoded():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<|python_tag|>", special=True), AddedToken("<|eom_id|>", special=True)])
    text = 'See.<|python_tag|>{"name": "f", "parameters": {"a": "<b>"}}'
    ids = tokenizer(text + "<|eom_id|>", add_special_tokens=False)["input_ids"]
    turn = read_turn(tokenizer, [*ids, tokenizer.eos_token_id], TOOL_PARSERS["llama3"])
    assert turn == AssistantTurn("See.", [ToolCall("f", {"a": "<b>"})])


def test_the_schemas_of_the_tools_say_what_untyped_arguments_are():
    def lookup(word: str, limit: int | None = None) -> str:
        """Look a word up.

        Args:
            word: The word.
            limit: How many lines.
        """

    tool = Tool.of(lookup)
    text = "<function=lookup><parameter=word>42</parameter><parameter=limit>2</parameter></function>"
    tokenizer = tiny.tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parser = TOOL_PARSERS["qwen3_coder"]
    (call,) = read_turn(tokenizer, ids, parser, [tool.schema]).calls
    assert tool.arguments(call.arguments) == {"word": "42", "limit": 2}
    (unknown,) = read_turn(tokenizer, ids, parser).calls
    assert unknown.arguments == {"word": 42, "limit": 2}


RESPONSE_TEMPLATE = {
    "start_anchor": "<bos>assistant: ",
    "fields": {
        "content": {"close": "<eos>"},
        "tool_calls": {
            "open": "<<",
            "close": ">>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}},
        },
    },
}


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ('So: <<{"tool": "f", "with": {"a": 1}}>>', AssistantTurn("So:", [ToolCall("f", {"a": 1})])),
        ("No <call>.", AssistantTurn("No <call>.")),
        ('{"name": "f", "arguments": {}}', AssistantTurn("", [ToolCall("f", {})])),
    ],
)
def test_a_response_template_reads_families_without_a_parser(text, turn):
    tokenizer = tiny.tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert read_turn(tokenizer, ids, TOOL_PARSERS["json"]) == turn


def test_calls_unreadable_for_a_response_template_are_malformed():
    tokenizer = tiny.tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    turn = read_turn(tokenizer, tokenizer('<<{"tool": "f">>')["input_ids"], TOOL_PARSERS["json"])
    assert turn.calls == [] and "JSON" in turn.malformed[0].reason


@pytest.mark.parametrize(
    "notation, call",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("json", '{"name": "f", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}'),
        ("gemma", "```tool_code\nf()\n```"),
        ("glm", "<tool_call>f</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
)
def test_no_notation_calls_inside_thinking(notation, call):
    parse = TOOL_PARSERS[notation].parse

    def calls(text, opened=""):
        return [one.name for one in parse_outside_thinking(parse, text, opened).calls]

    assert calls(call) == ["f"] and calls(f"<think>so</think>\n{call}") == ["f"]
    assert calls(f"so</think>\n{call}", "<think>\n") == ["f"]
    assert (
        calls(f"so {call}", "<think>\n") == calls(f"[THINK]so {call}") == calls(f"<think>a</think>b<think>{call}") == []
    )
    assert calls(f"so {call} no</think>4", "<think>\n") == []


def test_a_mark_of_thinking_in_an_argument_opens_none():
    text = '<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>'
    turn = parse_outside_thinking(TOOL_PARSERS["hermes"].parse, text)
    assert [one.arguments for one in turn.calls] == [{"x": "<think>"}] and not turn.malformed
