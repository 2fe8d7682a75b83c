"""How model families write tool calls: from the text of an assistant's turn to calls.

A parser is a function `text -> AssistantTurn` in the table `TOOL_PARSERS`; `parser_for` chooses one by what the chat
template mentions and `read_turn` applies it to tokens. A parser never raises, whatever the text: what was meant as a
call and cannot be read becomes a `MalformedCall` with the reason. It takes time linear in the text.

To add a family, write such a function, usually by collecting `(start, end, parts)` spans for `spans.assemble`, and
register it: `TOOL_PARSERS.register("mine", ToolParser(parse, marks=("<my_call>",), tokens=("<my_call>",)))`. Here
are the notations in JSON and in Python; those with marks of their own are read in `marked`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.rollout.tools.calls import AssistantTurn, MalformedCall, Unreadable, decode_json
from covey.rollout.tools.json_scanner import Finder, Scanner, read_python_calls
from covey.rollout.tools.parser_parts import Part, Span, answer_start, assemble, named, parts_of, tagged
from covey.rollout.tools.parsers_xml import (
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM_TOKENS,
    parse_glm,
    parse_marked_gemma,
    parse_qwen3_coder,
)
from covey.rollout.tools.schema import from_text
from covey.runtime.registry import Registry


@dataclass(frozen=True)
class ToolParser:
    """One way of writing calls.

    Attributes:
        parse: from the text of an assistant's turn, special tokens of the notation included, to its parts.
        marks: texts by which a chat template that uses this notation is recognised; any one will do.
        tokens: special tokens that belong to the notation and are kept when a turn is decoded.
    """

    parse: Callable[[str], AssistantTurn]
    marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


TOOL_PARSERS: Registry[ToolParser] = Registry("tool parser")
"""Every notation by name; the first one whose mark is in a chat template is taken."""


def parser_for(chat_template: str | dict[str, str] | None) -> str:
    """The name of the parser whose marks the chat template mentions; "json" if none does."""
    if isinstance(chat_template, dict):
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    template = chat_template or ""
    return next((name for name, one in TOOL_PARSERS.items() if any(mark in template for mark in one.marks)), "json")


def read_turn(
    tokenizer: Any,
    token_ids: Sequence[int],
    parser: ToolParser,
    tools: Sequence[dict[str, Any]] = (),
    begun: str = "",
) -> AssistantTurn:
    """Decode a sampled turn and take it apart.

    Special tokens are dropped (the end of the turn), except those of the notation. The decoded text serves reading
    alone: the tokens themselves stay what was sampled.

    Args:
        tokenizer: of the policy.
        token_ids: of the turn.
        parser: of the notation.
        tools: schemas that say what arguments are, where the notation does not.
        begun: what stood in the turn before the policy took over.
    """
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and str(token) not in parser.tokens
    }
    kept = [token for token in token_ids if token not in special]
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    turn = parser.parse(begun + text)
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for call in turn.calls:
        if call.texts is not None and call.name in parameters:
            known = parameters[call.name].get("properties") or {}
            call.arguments = {name: from_text(text, known.get(name, {})) for name, text in call.texts.items()}
    return turn


# --- Marks of their own, before the families whose marks such a template mentions too ----------------------------

TOOL_PARSERS.register("qwen3_coder", ToolParser(parse_qwen3_coder, ("<parameter=",), ("<tool_call>", "</tool_call>")))
TOOL_PARSERS.register("glm", ToolParser(parse_glm, ("<arg_key>",), GLM_TOKENS))
for _name, _marks in {"functiongemma": FUNCTION_GEMMA, "gemma4": GEMMA_4}.items():
    _parse = partial(parse_marked_gemma, marks=_marks)
    TOOL_PARSERS.register(_name, ToolParser(_parse, (_marks.opening,), (_marks.opening, _marks.closing, _marks.quote)))


# --- Hermes: Qwen 2.5 and 3, SmolLM 3 and many others ------------------------------------------------------------


def parse_hermes(text: str) -> AssistantTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call."""
    return tagged(text, "<tool_call>", "</tool_call>", _read_object)


def _read_object(text: str) -> list[Part]:
    return parts_of(decode_json(text), text)


TOOL_PARSERS.register("hermes", ToolParser(parse_hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")))


# --- DeepSeek ----------------------------------------------------------------------------------------------------

_DS = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}


def parse_deepseek(text: str) -> AssistantTurn:
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`; V3 has a type before it and a fence around."""
    turn = tagged(text, _DS["call▁begin"], _DS["call▁end"], _read_deepseek)
    for outer in (_DS["calls▁begin"], _DS["calls▁end"]):
        turn.content = turn.content.replace(outer, "")
    turn.content = turn.content.strip()
    return turn


def _read_deepseek(text: str) -> list[Part]:
    head, sep, body = text.partition(_DS["sep"])
    if not sep:
        return [MalformedCall(text, f"there is no {_DS['sep']} between the tool's name and its arguments")]
    if head.strip() == "function" and "\n" in body:  # V3 and R1: function<sep>name\n```json\n{...}\n```
        head, _, body = body.partition("\n")
    return [named(head.strip(), _unfenced(body), text)]


def _unfenced(text: str) -> str:
    """Without ```json before and ``` after."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = text[3:-3].removeprefix("json")
    return text.strip()


TOOL_PARSERS.register("deepseek", ToolParser(parse_deepseek, ("<｜tool▁call",), tuple(_DS.values())))


# --- Mistral -----------------------------------------------------------------------------------------------------

_TOOL_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK = ("[THINK]", "[/THINK]")  # Magistral and later; models trained by others on top of Mistral write <think>


def parse_mistral(text: str) -> AssistantTurn:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` once for each call."""
    scanner, opens = Scanner(text), Finder(text, _TOOL_CALLS)
    spans: list[Span] = []
    start = opens(max(answer_start(text), answer_start(text, *_THINK)))
    while start < len(text):
        inner = scanner.skip_space(start + len(_TOOL_CALLS))
        limit = opens(inner)
        if text.startswith(("[", "{"), inner):
            found = scanner.value(inner)
            stop = found[1] if found else limit
            parts = parts_of(found[0] if found else Unreadable("it is not closed"), text[inner:stop])
        else:
            stop, parts = _named_mistral(text, scanner, inner, limit)
        spans.append((start, stop, parts))
        start = opens(stop)
    return assemble(text, spans)


def _named_mistral(text: str, scanner: Scanner, start: int, limit: int) -> tuple[int, list[Part]]:
    """`name[CALL_ID]id[ARGS]{...}` from `start` on: where it stops, and the call."""
    begin = text.find("{", start, limit)
    head_end = begin if begin >= 0 else limit
    name, _, call_id = text[start:head_end].partition(_ARGS)[0].partition(_CALL_ID)
    found = scanner.value(begin) if begin >= 0 else None
    if found is None:
        reason = "the arguments are not closed" if begin >= 0 else "there are no arguments in braces after the name"
        return limit, [MalformedCall(text[start:limit], reason)]
    return found[1], [named(name.strip(), text[begin : found[1]], text[start : found[1]], call_id.strip())]


TOOL_PARSERS.register("mistral", ToolParser(parse_mistral, (_TOOL_CALLS,), (_TOOL_CALLS, _ARGS, _CALL_ID, *_THINK)))


# --- Llama 3 -----------------------------------------------------------------------------------------------------

_PYTHON_TAG = "<|python_tag|>"


def parse_llama3(text: str) -> AssistantTurn:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or what follows `<|python_tag|>`; `;` between calls.

    After the tag a call of a built-in tool may also read `search.call(query="...")`, and the small models of 3.2 write
    `[f(a=1), g(b="x")]` as the whole turn. Without the tag an object that is no call is content.
    """
    tag = text.find(_PYTHON_TAG)
    if tag >= 0:
        body = text[tag + len(_PYTHON_TAG) :]
        return assemble(text, [(tag, len(text), _llama_parts(body, tagged=True))])
    if _CALL_LIST.match(text):
        return _call_list(text)
    if not text.lstrip().startswith("{"):
        return AssistantTurn(text.strip())
    parts = _llama_parts(text, tagged=False)
    return assemble(text, [(0, len(text), parts)]) if parts else AssistantTurn(text.strip())


def _llama_parts(text: str, tagged: bool) -> list[Part]:
    """Objects with `;` or white space between them. Untagged, nothing if they are no calls or followed by prose."""
    scanner = Scanner(text)
    parts: list[Part] = []
    start = scanner.skip_space(0)
    while start < len(text):
        found = scanner.value(start)
        if found is None:
            if not tagged and (parts or not _CALL_LIKE.match(text, start)):
                return parts
            return [*parts, *_llama_rest(text[start:])]
        value, end = found
        if not tagged and not _looks_like_call(value, text[start:end]):
            return parts
        parts += parts_of(value, text[start:end])
        start = scanner.skip_space(end)
        if text.startswith(";", start):
            start = scanner.skip_space(start + 1)
    return parts


_CALL_LIST = re.compile(r"\s*+\[\s*+[^\W\d][\w.]*+\(")


def _call_list(text: str) -> AssistantTurn:
    """A turn that is `[f(a=1), g(b="x")]` from its beginning on."""
    calls = read_python_calls(text)
    if isinstance(calls, Unreadable):
        return AssistantTurn("", [], [MalformedCall(text.strip(), str(calls))])
    return AssistantTurn("", calls)


def _llama_rest(text: str) -> list[Part]:
    calls = read_python_calls(text)
    if not isinstance(calls, Unreadable) and calls:
        return list(calls)
    return [MalformedCall(text, "it is neither a JSON object with 'name' and 'parameters' nor tool.call(argument=...)")]


TOOL_PARSERS.register("llama3", ToolParser(parse_llama3, (_PYTHON_TAG, "Environment: ipython"), (_PYTHON_TAG,)))


# --- Gemma -------------------------------------------------------------------------------------------------------

_FENCED = re.compile(r"```([a-z_]*+)[ \t]*+\n(.*?)(?:```|\Z)", re.DOTALL)


def parse_gemma(text: str) -> AssistantTurn:
    """Calls in Python notation in a fence named `tool_code`, or as the whole turn: `[f(a=1), g(b="x")]`.

    Calls as JSON objects are read as well, since Gemma is prompted either way.
    """
    spans: list[Span] = []
    for fence in _FENCED.finditer(text):
        if fence[1] == "tool_code":
            calls = read_python_calls(fence[2])
            parts: list[Part] = [MalformedCall(fence[2], calls)] if isinstance(calls, Unreadable) else [*calls]
            spans.append((*fence.span(), parts))
    if spans:
        return assemble(text, spans)
    if _CALL_LIST.match(text):
        return _call_list(text)
    if _BARE_CALL.match(text):
        calls = read_python_calls(text)
        if not isinstance(calls, Unreadable):
            return AssistantTurn("", calls)
    return parse_json(text)


_BARE_CALL = re.compile(r"\s*+[^\W\d][\w.]*+\(")

TOOL_PARSERS.register("gemma", ToolParser(parse_gemma, ("tool_code", "<start_of_turn>")))


# --- Generic JSON ------------------------------------------------------------------------------------------------

_CALL_LIKE = re.compile(r'[\[{\s]*+"(?:name|function|type|arguments|parameters)"')
_OPENING = re.compile(r'\{(?=\s*+")|\[(?=\s*+\{\s*+")')


def parse_json(text: str) -> AssistantTurn:
    """Any JSON object with a name and arguments, or a list of them, fenced or not, anywhere in the turn.

    Other JSON is content. An object that begins like a call and cannot be read is malformed.
    """
    scanner = Scanner(text)
    spans: list[Span] = []
    at = _OPENING.search(text, answer_start(text))
    while at:
        start = at.start()
        found = scanner.value(start)
        stop = found[1] if found else start + 1
        if found and _looks_like_call(found[0], text[start:stop]):
            spans.append(_widened(text, start, stop, parts_of(found[0], text[start:stop])))
        elif not found and _CALL_LIKE.match(text, start):
            stop = len(text)
            spans.append((start, stop, [MalformedCall(text[start:], "the JSON object is not closed")]))
        at = _OPENING.search(text, stop)
    return assemble(text, spans)


_FENCE_BEFORE = re.compile(r"```[a-z_]*[ \t]*\n?\s*\Z")
_FENCE_AFTER = re.compile(r"\s*+```")
_FENCE_REACH = 40


def _widened(text: str, start: int, stop: int, parts: list[Part]) -> Span:
    """The span with the fence around it, if there is one."""
    before = _FENCE_BEFORE.search(text, max(0, start - _FENCE_REACH), start)
    after = _FENCE_AFTER.match(text, stop)
    return (before.start(), after.end(), parts) if before and after else (start, stop, parts)


def _looks_like_call(value: Any, text: str) -> bool:
    """Whether a value is meant as a call: it has a name and arguments, or, unreadable, begins as if it had."""
    if isinstance(value, Unreadable):
        return _CALL_LIKE.match(text) is not None
    if isinstance(value, list):
        return bool(value) and all(_looks_like_call(item, "") for item in value)
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        value = value["function"]
    named = isinstance(value.get("name", value.get("function")), str)
    return named and any(key in value for key in ("arguments", "parameters", "args"))


TOOL_PARSERS.register("json", ToolParser(parse_json))
