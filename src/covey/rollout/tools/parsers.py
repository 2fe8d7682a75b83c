"""Tool-call parsers: they find the calls in the text of an assistant's turn, in the notation of a model family.

A parser is a function `text -> AssistantTurn`. It never raises (a call that cannot be read becomes a `MalformedCall`)
and takes time linear in the text. To add a family, write one, usually by collecting spans for `calls.turn_without`, and
register it: `TOOL_PARSERS.register("mine", ToolParser(parse, marks=("<my_call>",), tokens=("<my_call>",)))`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.core.special_tokens import THINKING
from covey.rollout.tools.calls import (
    AssistantTurn,
    Finder,
    MalformedCall,
    Part,
    Scanner,
    Span,
    ToolCall,
    Unreadable,
    answer_start,
    calls_at,
    calls_between,
    calls_in,
    decode_json,
    named_call,
    read_call,
    turn_without,
)
from covey.rollout.tools.literals import read_gemma_call, read_python_calls
from covey.rollout.tools.schema import from_text
from covey.runtime.registry import Registry
from covey.runtime.user_code import format_error


@dataclass(frozen=True)
class ToolParser:
    """One notation of calls."""

    parse: Callable[[str], AssistantTurn]  # of the text of a turn, special tokens of the notation included
    marks: tuple[str, ...] = ()  # texts, any of which in a chat template shows that it uses this notation
    tokens: tuple[str, ...] = ()  # special tokens of the notation, which must be kept when a turn is decoded


TOOL_PARSERS: Registry[ToolParser] = Registry("tool parser")
"""Every notation by name; the first one with a mark in the chat template is used."""


def parser_for(chat_template: str | dict[str, str] | None) -> str:
    """The name of the parser whose marks the chat template mentions; "json" if none does."""
    if isinstance(chat_template, dict):
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    template = chat_template or ""
    return next((name for name, one in TOOL_PARSERS.items() if any(mark in template for mark in one.marks)), "json")


def read_turn(
    tokenizer: Any,
    token_ids: list[int],
    parser: ToolParser,
    tools: Sequence[dict[str, Any]] = (),
    prefill: str = "",
    opened: str = "",
    shown: Collection[int] = (),
) -> AssistantTurn:
    """Decode a sampled turn and parse it.

    Args:
        tokenizer: of the policy.
        token_ids: of the turn.
        parser: the notation of calls.
        tools: schemas, which give the types of arguments if the notation does not.
        prefill: text at the end of the prompt that the turn continues.
        opened: text before the turn that opens thinking; the content does not repeat it.
        shown: special tokens that are kept in the content.
    """
    kept = {*parser.tokens, *THINKING, *THINKING.values()}
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and str(token) not in kept and number not in shown
    }
    own_ids = [token for token in token_ids if token not in special]
    text = prefill + tokenizer.decode(own_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    turn = None
    if parser is TOOL_PARSERS["json"] and not ends_in_thinking(text, opened):
        turn = _read_response_template(tokenizer, token_ids, prefill)
    if turn is None:
        turn = parse_outside_thinking(parser.parse, text, opened)
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for call in turn.calls:
        if call.texts is not None and call.name in parameters:
            known = parameters[call.name].get("properties") or {}
            call.arguments = {name: from_text(text, known.get(name, {})) for name, text in call.texts.items()}
    return turn


_OPENINGS = re.compile("|".join(map(re.escape, THINKING)))


def parse_outside_thinking(parse: Callable[[str], AssistantTurn], text: str, opened: str = "") -> AssistantTurn:
    """The turn with its calls outside of blocks of thinking; a block that is not closed ends with the turn.

    `opened` is the text before the turn that opens the first block. A mark inside a call does not open a block.
    """
    content, calls, malformed = "", list[ToolCall](), list[MalformedCall]()

    def add(turn: AssistantTurn, piece: str) -> None:
        nonlocal content
        before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
        content += before + turn.content + after if turn.content else before
        calls.extend(turn.calls)
        malformed.extend(turn.malformed)

    rest, closing = text, THINKING.get(opened.strip())
    while True:
        if closing is not None:
            thought, closed, rest = rest.partition(closing)
            content += thought + closed
            if not closed:
                break
        opening = _OPENINGS.search(rest)
        piece = rest[: opening.start()] if opening else rest
        turn = parse(piece)
        if opening is None or turn.malformed:  # where a call is cut in two, the mark is part of it
            add(turn if opening is None else parse(rest), rest)
            break
        add(turn, piece)
        content += opening[0]
        rest, closing = rest[opening.end() :], THINKING[opening[0]]
    return AssistantTurn(content.strip(), calls, malformed)


def ends_in_thinking(text: str, opened: str = "") -> bool:
    """True if a turn's last block of thinking is not closed."""
    marks = [(match.end(), THINKING[match[0]]) for match in _OPENINGS.finditer(text)]
    start, closing = marks[-1] if marks else (0, THINKING.get(opened.strip()))
    return closing is not None and closing not in text[start:]


def _read_response_template(tokenizer: Any, token_ids: Sequence[int], prefill: str) -> AssistantTurn | None:
    """The turn as transformers parses it by the tokenizer's response template; None without a template or a call."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    text = prefill + tokenizer.decode(token_ids)
    try:
        message = tokenizer.parse_response(text, prefix="")
        calls = [read_call(call) for call in message.get("tool_calls") or ()]
    except Exception as error:  # templates are written by the authors of models: reading with them may raise anything
        opening = template["fields"].get("tool_calls", {}).get("open", [])
        begun = any(mark in text for mark in ([opening] if isinstance(opening, str) else opening))
        return AssistantTurn("", [], [MalformedCall(text, format_error(error))]) if begun else None
    good = [call for call in calls if isinstance(call, ToolCall)]
    bad = [MalformedCall(text, reason) for reason in calls if isinstance(reason, str)]
    return AssistantTurn(message.get("content") or "", good, bad) if calls else None


_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
_GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


def parse_marked_gemma(marks: tuple[str, str, str, str], text: str) -> AssistantTurn:
    """`call:name{key:<quote>text<quote>,items:[1,2]}` between two marks; a turn with calls may end with `answer`."""
    opening, closing, quote, answer = marks
    turn = calls_between(text, opening, closing, lambda body: [read_gemma_call(body, quote)])
    if turn.asks:
        turn.content = turn.content.removesuffix(answer).rstrip()
    return turn


def parse_hermes(text: str) -> AssistantTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call (Qwen, SmolLM 3, others)."""
    return calls_between(text, "<tool_call>", "</tool_call>", lambda body: calls_in(decode_json(body), body))


_DS = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}


def parse_deepseek(text: str) -> AssistantTurn:
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`; V3 has a type before it and a fence around."""
    turn = calls_between(text, _DS["call▁begin"], _DS["call▁end"], _read_deepseek)
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
    arguments = body.strip()
    if arguments.startswith("```") and arguments.endswith("```") and len(arguments) >= 6:
        arguments = arguments[3:-3].removeprefix("json").strip()
    return [named_call(head.strip(), arguments, text)]


_TOOL_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK = ("[THINK]", "[/THINK]")  # Magistral and later; models trained by others on top of Mistral write <think>


def parse_mistral(text: str) -> AssistantTurn:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` once for each call."""
    scanner, openings = Scanner(text), Finder(text, _TOOL_CALLS)

    def read(start: int) -> tuple[int, list[Part]]:
        inner = scanner.skip_space(start + len(_TOOL_CALLS))
        limit = openings(inner)
        if not text.startswith(("[", "{"), inner):
            return _named_mistral(text, scanner, inner, limit)
        value, stop = scanner.value(inner) or (Unreadable("it is not closed"), limit)
        return stop, calls_in(value, text[inner:stop])

    return calls_at(text, openings, read, max(answer_start(text), answer_start(text, *_THINK)))


def _named_mistral(text: str, scanner: Scanner, start: int, limit: int) -> tuple[int, list[Part]]:
    """End and content of the call `name[CALL_ID]id[ARGS]{...}` that begins at `start`."""
    begin = text.find("{", start, limit)
    head_end = begin if begin >= 0 else limit
    name, _, call_id = text[start:head_end].partition(_ARGS)[0].partition(_CALL_ID)
    found = scanner.value(begin) if begin >= 0 else None
    if found is None:
        reason = "the arguments are not closed" if begin >= 0 else "there are no arguments in braces after the name"
        return limit, [MalformedCall(text[start:limit], reason)]
    return found[1], [named_call(name.strip(), text[begin : found[1]], text[start : found[1]], call_id.strip())]


_PYTHON_TAG = "<|python_tag|>"
_CALL_LIST = re.compile(r"\s*+\[\s*+[^\W\d][\w.]*+\(")


def parse_llama3(text: str) -> AssistantTurn:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or the text after `<|python_tag|>`; `;` between calls.

    After the tag a call of a built-in tool may also read `search.call(query="...")`, and the small models of 3.2 write
    `[f(a=1), g(b="x")]` as the whole turn. Without the tag an object that is no call is content.
    """
    tag = text.find(_PYTHON_TAG)
    if tag >= 0:
        body = text[tag + len(_PYTHON_TAG) :]
        return turn_without(text, [(tag, len(text), _llama_parts(body, tagged=True))])
    if _CALL_LIST.match(text):
        return turn_without(text, [(0, len(text), _python_parts(text.strip()))])
    parts = _llama_parts(text, tagged=False) if text.lstrip().startswith("{") else []
    return turn_without(text, [(0, len(text), parts)] if parts else [])


def _llama_parts(text: str, tagged: bool) -> list[Part]:
    """Objects separated by `;` or white space. Without the tag: nothing, if they are not calls or prose follows."""
    scanner = Scanner(text)
    parts: list[Part] = []
    start = scanner.skip_space(0)
    while start < len(text):
        found = scanner.value(start)
        if found is None:
            if not tagged and (parts or not _CALL_LIKE.match(text, start)):
                return parts
            calls = read_python_calls(text[start:])
            if isinstance(calls, Unreadable) or not calls:
                reason = "it is neither a JSON object with 'name' and 'parameters' nor tool.call(argument=...)"
                return [*parts, MalformedCall(text[start:], reason)]
            return [*parts, *calls]
        value, end = found
        if not tagged and not _looks_like_call(value, text[start:end]):
            return parts
        parts += calls_in(value, text[start:end])
        start = scanner.skip_space(end)
        if text.startswith(";", start):
            start = scanner.skip_space(start + 1)
    return parts


def _python_parts(text: str) -> list[Part]:
    calls = read_python_calls(text)
    return [MalformedCall(text, calls)] if isinstance(calls, Unreadable) else [*calls]


_FENCED = re.compile(r"```([a-z_]*+)[ \t]*+\n(.*?)(?:```|\Z)", re.DOTALL)
_BARE_CALL = re.compile(r"\s*+[^\W\d][\w.]*+\(")


def parse_gemma(text: str) -> AssistantTurn:
    """Calls in Python notation in a fence named `tool_code`, or `[f(a=1), g(b="x")]` as the whole turn; JSON too."""
    spans = [(*fence.span(), _python_parts(fence[2])) for fence in _FENCED.finditer(text) if fence[1] == "tool_code"]
    if not spans and _CALL_LIST.match(text):
        spans = [(0, len(text), _python_parts(text.strip()))]
    if spans:
        return turn_without(text, spans)
    calls = read_python_calls(text) if _BARE_CALL.match(text) else Unreadable()
    return parse_json(text) if isinstance(calls, Unreadable) else AssistantTurn("", calls)


_CALL_LIKE = re.compile(r'[\[{\s]*+"(?:name|function|type|arguments|parameters)"')
_OPENING = re.compile(r'\{(?=\s*+")|\[(?=\s*+\{\s*+")')
_FENCE_BEFORE = re.compile(r"```[a-z_]*[ \t]*\n?\s*\Z")
_FENCE_AFTER = re.compile(r"\s*+```")
_LONGEST_FENCE = 40


def parse_json(text: str) -> AssistantTurn:
    """Any JSON object with a name and arguments, or a list of them, fenced or not; other JSON is content."""
    scanner = Scanner(text)
    spans: list[Span] = []
    at = _OPENING.search(text, answer_start(text))
    while at:
        start = at.start()
        found = scanner.value(start)
        stop = found[1] if found else start + 1
        if found and _looks_like_call(found[0], text[start:stop]):
            before = _FENCE_BEFORE.search(text, max(0, start - _LONGEST_FENCE), start)
            after = _FENCE_AFTER.match(text, stop)
            outer = (before.start(), after.end()) if before and after else (start, stop)
            spans.append((*outer, calls_in(found[0], text[start:stop])))
        elif not found and _CALL_LIKE.match(text, start):
            stop = len(text)
            spans.append((start, stop, [MalformedCall(text[start:], "the JSON object is not closed")]))
        at = _OPENING.search(text, stop)
    return turn_without(text, spans)


def _looks_like_call(value: Any, text: str) -> bool:
    """True for a value with a name and arguments, and for unreadable text that begins as if it had them."""
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


# --- notations in XML tags: arguments are plain text, and the schema of the tool decides what they are ----------------

_TAG = re.compile(r"<tool_call>|<function=")
_TAGS = re.compile(r"(?:<tool_call>\s*+)?(?:<function=)?")
_FUNCTION_TAG = re.compile(r"(?:<tool_call>\s*+)?<function=([^<>\n]*+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]*+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</?function|</?tool_call>|\Z))")
_CALL_END = re.compile(r"\s*+(?:</function>(?:\s*+</tool_call>)?|</tool_call>|(?=<tool_call>|<function=)|\Z)")
_RESUME = re.compile(r"</tool_call>|</function>(?:\s*+</tool_call>)?|(?=<tool_call>|<function=)")


def parse_qwen3_coder(text: str) -> AssistantTurn:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, once for each call.

    A value ends at the `</parameter>` that a further tag follows, so that it may hold the tag itself. The tags around
    `<function=...>` and its end may be missing. A line break at either end of a value is layout.
    """
    ends = [end.span() for end in _VALUE_END.finditer(text)]

    def find(start: int) -> int:
        found = _TAG.search(text, start)
        return found.start() if found else len(text)

    return calls_at(text, find, lambda at: _read_qwen3_coder(text, at, ends), answer_start(text))


def _read_qwen3_coder(text: str, start: int, ends: list[tuple[int, int]]) -> tuple[int, list[Part]]:
    """End and content of the call at `start`; `ends` are the positions where a value may end."""
    head = _FUNCTION_TAG.match(text, start)
    if head is None or not head[1].strip():
        opening = _TAGS.match(text, start)
        assert opening, "it matches anything"
        return _malformed(text, start, opening.end(), "there is no <function=name> with the name of a tool in it")
    texts: dict[str, str] = {}
    at = head.end()
    while parameter := _PARAMETER.match(text, at):
        index = bisect_left(ends, (parameter.end() - 1, 0))  # an empty value: its line break may be the one just read
        if index == len(ends):
            reason = f"the argument {parameter[1]} is not closed by </parameter>"
            return _malformed(text, start, parameter.end(), reason)
        value_end, at = ends[index]
        texts[parameter[1].strip()] = text[parameter.end() : max(value_end, parameter.end())]
    end = _CALL_END.match(text, at)
    if end is None:
        return _malformed(text, start, at, "only <parameter=name>value</parameter> may stand within <function=...>")
    return end.end(), _untyped_call(head[1].strip(), texts)


def _untyped_call(name: str, texts: dict[str, str]) -> list[Part]:
    return [ToolCall(name, {key: from_text(value, {}) for key, value in texts.items()}, texts)]


def _malformed(
    text: str, start: int, read: int, reason: str, resume: re.Pattern[str] = _RESUME
) -> tuple[int, list[Part]]:
    """A call that cannot be read beyond `read`: it extends to the next tag, so that calls after it can be read."""
    after = resume.search(text, read)
    stop = after.end() if after else len(text)
    return stop, [MalformedCall(text[start:stop], reason)]


GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_NAME = re.compile(r"<tool_call>\s*+([^\s<>{}]++)\s*+")
_GLM_KEY = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
_GLM_END = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_GLM_RESUME = re.compile(r"</tool_call>|(?=<tool_call>)")


def parse_glm(text: str) -> AssistantTurn:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` (GLM 4.5 on), once a call."""
    openings, value_ends = Finder(text, "<tool_call>"), Finder(text, "</arg_value>")
    return calls_at(text, openings, lambda at: _read_glm(text, at, value_ends), answer_start(text))


def _read_glm(text: str, start: int, value_ends: Finder) -> tuple[int, list[Part]]:
    head = _GLM_NAME.match(text, start)
    if head is None:
        read = start + len("<tool_call>")
        return _malformed(text, start, read, "it does not begin with the name of a tool", _GLM_RESUME)
    texts: dict[str, str] = {}
    at = head.end()
    while key := _GLM_KEY.match(text, at):
        end = value_ends(key.end())
        if end == len(text):
            reason = f"the argument {key[1]} is not closed by </arg_value>"
            return _malformed(text, start, key.end(), reason, _GLM_RESUME)
        texts[key[1].strip()] = text[key.end() : end]
        at = end + len("</arg_value>")
    after = _GLM_END.match(text, at)
    if after is None:
        reason = "after the name only <arg_key>name</arg_key><arg_value>value</arg_value> may stand"
        return _malformed(text, start, at, reason, _GLM_RESUME)
    return after.end(), _untyped_call(head[1], texts)


# Templates with the notations in XML mention marks of other families too, so these come first.
for _name, _parser in {
    "qwen3_coder": ToolParser(parse_qwen3_coder, ("<parameter=",), ("<tool_call>", "</tool_call>")),
    "glm": ToolParser(parse_glm, ("<arg_key>",), GLM_TOKENS),
    "functiongemma": ToolParser(partial(parse_marked_gemma, _FUNCTION_GEMMA), _FUNCTION_GEMMA[:1], _FUNCTION_GEMMA[:3]),
    "gemma4": ToolParser(partial(parse_marked_gemma, _GEMMA_4), _GEMMA_4[:1], _GEMMA_4[:3]),
    "hermes": ToolParser(parse_hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    "deepseek": ToolParser(parse_deepseek, ("<｜tool▁call",), tuple(_DS.values())),
    "mistral": ToolParser(parse_mistral, (_TOOL_CALLS,), (_TOOL_CALLS, _ARGS, _CALL_ID, *_THINK)),
    "llama3": ToolParser(parse_llama3, (_PYTHON_TAG, "Environment: ipython"), (_PYTHON_TAG,)),
    "gemma": ToolParser(parse_gemma, ("tool_code", "<start_of_turn>")),
    "json": ToolParser(parse_json),
}.items():
    TOOL_PARSERS.register(_name, _parser)
