"""Notations that are neither JSON nor Python: arguments between marks of their own.

Qwen3-Coder's and GLM's write arguments as plain text, whatever their types; `ToolCall.texts` keeps it, and the tool's
schema decides what it is (`covey.rollout.tools.schema.from_text`). The Gemma models' has types, and a mark in place of
quotes.
Both take time linear in the text, and none of it makes them raise. Not here: the table of notations (`parsers`).
"""

import re
from bisect import bisect_left
from functools import partial
from typing import Any, NamedTuple

from covey.rollout.tools.calls import MAX_DEPTH, AssistantTurn, MalformedCall, ToolCall
from covey.rollout.tools.json_scanner import Finder, Scanner
from covey.rollout.tools.parser_parts import Part, Span, answer_start, assemble, tagged
from covey.rollout.tools.schema import from_text

# --- Qwen3-Coder -------------------------------------------------------------------------------------------------

_CALL = re.compile(r"<tool_call>|<function=")
_OPENING = re.compile(r"(?:<tool_call>\s*+)?(?:<function=)?")
_FUNCTION = re.compile(r"(?:<tool_call>\s*+)?<function=([^<>\n]*+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]*+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</?function|</?tool_call>|\Z))")
_CALL_END = re.compile(r"\s*+(?:</function>(?:\s*+</tool_call>)?|</tool_call>|(?=<tool_call>|<function=)|\Z)")
_RESUME = re.compile(r"</tool_call>|</function>(?:\s*+</tool_call>)?|(?=<tool_call>|<function=)")


def parse_qwen3_coder(text: str) -> AssistantTurn:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, once for each call.

    A value ends at the `</parameter>` that a further mark follows, so that it may hold the mark itself. The marks
    around `<function=...>` and its end may be missing. A line break at either end of a value is layout.
    """
    spans: list[Span] = []
    ends = [(end.start(), end.end()) for end in _VALUE_END.finditer(text)]
    found = _CALL.search(text, answer_start(text))
    while found:
        stop, part = _read_coder_call(text, found.start(), ends)
        spans.append((found.start(), stop, [part]))
        found = _CALL.search(text, stop)
    return assemble(text, spans)


def _read_coder_call(text: str, start: int, ends: list[tuple[int, int]]) -> tuple[int, Part]:
    """The call at `start` and where it stops; `ends` are the places where a value may end."""
    head = _FUNCTION.match(text, start)
    if head is None or not head[1].strip():
        opening = _OPENING.match(text, start)
        assert opening, "it matches anything"
        return _broken(text, start, opening.end(), "there is no <function=name> with the name of a tool in it")
    texts: dict[str, str] = {}
    at = head.end()
    while parameter := _PARAMETER.match(text, at):
        place = bisect_left(ends, (parameter.end() - 1, 0))  # an empty value: its line break may be the one just read
        if place == len(ends):
            return _broken(text, start, parameter.end(), f"the argument {parameter[1]} is not closed by </parameter>")
        value_end, at = ends[place]
        texts[parameter[1].strip()] = text[parameter.end() : max(value_end, parameter.end())]
    end = _CALL_END.match(text, at)
    if end is None:
        return _broken(text, start, at, "only <parameter=name>value</parameter> may stand within <function=...>")
    return end.end(), ToolCall(head[1].strip(), {key: from_text(value, {}) for key, value in texts.items()}, texts)


def _broken(text: str, start: int, read: int, reason: str, resume: re.Pattern[str] = _RESUME) -> tuple[int, Part]:
    """A call that was read up to `read` and cannot be: it takes all up to a mark from where others may be read."""
    after = resume.search(text, read)
    stop = after.end() if after else len(text)
    return stop, MalformedCall(text[start:stop], reason)


# --- GLM 4.5 and later ---------------------------------------------------------------------------------------------

GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_NAME = re.compile(r"<tool_call>\s*+([^\s<>{}]++)\s*+")
_GLM_KEY = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
_GLM_END = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_GLM_RESUME = re.compile(r"</tool_call>|(?=<tool_call>)")


def parse_glm(text: str) -> AssistantTurn:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, once for each call.

    A value ends at the first `</arg_value>`, and all of it counts; white space between marks is layout.
    """
    spans: list[Span] = []
    opens, closes = Finder(text, "<tool_call>"), Finder(text, "</arg_value>")
    start = opens(answer_start(text))
    while start < len(text):
        stop, part = _read_glm_call(text, start, closes)
        spans.append((start, stop, [part]))
        start = opens(stop)
    return assemble(text, spans)


def _read_glm_call(text: str, start: int, closes: Finder) -> tuple[int, Part]:
    """The call at `start` and where it stops; `closes` finds where values end."""
    head = _GLM_NAME.match(text, start)
    if head is None:
        return _broken(
            text, start, start + len("<tool_call>"), "it does not begin with the name of a tool", _GLM_RESUME
        )
    texts: dict[str, str] = {}
    at = head.end()
    while key := _GLM_KEY.match(text, at):
        end = closes(key.end())
        if end == len(text):
            reason = f"the argument {key[1]} is not closed by </arg_value>"
            return _broken(text, start, key.end(), reason, _GLM_RESUME)
        texts[key[1].strip()] = text[key.end() : end]
        at = end + len("</arg_value>")
    after = _GLM_END.match(text, at)
    if after is None:
        reason = "after the name only <arg_key>name</arg_key><arg_value>value</arg_value> may stand"
        return _broken(text, start, at, reason, _GLM_RESUME)
    return after.end(), ToolCall(head[1], {key: from_text(value, {}) for key, value in texts.items()}, texts)


# --- Gemma models with calls of their own ------------------------------------------------------------------------

_NAMED = re.compile(r"call:\s*+([^\s{]++)\s*+\{")
_KEY = re.compile(r"\s*+([^\s{}\[\]:,<>|]++)\s*+:\s*+")
_PLAIN = re.compile(r"(true|false|null)\b|(-?(?:0|[1-9][0-9]{0,399}+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)(?![\w.])")
_WORDS = {"true": True, "false": False, "null": None}


class GemmaMarks(NamedTuple):
    """The control tokens of a notation.

    Attributes:
        opening, closing: around a call.
        quote: on either side of a string, which cannot hold it.
        answer: begins the results; a turn that asks may end with it.
    """

    opening: str
    closing: str
    quote: str
    answer: str


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
GEMMA_4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


def parse_marked_gemma(text: str, marks: GemmaMarks) -> AssistantTurn:
    """`call:name{key:<escape>text<escape>,n:3,items:[1,2]}` between two marks, once for each call."""
    turn = tagged(text, marks.opening, marks.closing, partial(_read_gemma_call, quote=marks.quote))
    if turn.asks:
        turn.content = turn.content.removesuffix(marks.answer).rstrip()
    return turn


def _read_gemma_call(text: str, quote: str) -> list[Part]:
    head = _NAMED.match(text)
    if head is None:
        return [MalformedCall(text, "it does not begin with call:name{")]
    reader = _GemmaValues(text, quote)
    try:
        arguments, end = reader.mapping(head.end(), MAX_DEPTH)
    except _Wrong as wrong:
        return [MalformedCall(text, str(wrong))]
    if text[end:].strip():
        return [MalformedCall(text, f"something follows the arguments: {text[end:].strip()[:20]!r}")]
    return [ToolCall(head[1], arguments)]


class _Wrong(Exception):
    """The text is not in the notation; the message says why."""


class _GemmaValues:
    """Recursive descent to a limited depth. Each method takes where to begin and returns a value and where it ends."""

    def __init__(self, text: str, quote: str):
        self.text, self.quote = text, quote
        self.skip = Scanner(text).skip_space

    def mapping(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """What follows an opening brace."""
        mapping: dict[str, Any] = {}
        while not self._at("}", at):
            key, at = self._key(at)
            mapping[key], at = self.value(at, depth)
            at = self._separator(at, "}")
        return mapping, self.skip(at) + 1

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """A string, number, word, list or mapping."""
        if depth == 0:
            raise _Wrong("it is nested too deeply")
        if self.text.startswith(self.quote, at):
            return self._string(at + len(self.quote))
        if self._at("{", at):
            return self.mapping(at + 1, depth - 1)
        if self._at("[", at):
            return self._list(at + 1, depth - 1)
        plain = _PLAIN.match(self.text, at)
        if plain is None:
            raise _Wrong(
                f"cannot read {self.text[at : at + 20]!r}: a string stands between {self.quote} and {self.quote}"
            )
        if plain[1]:
            return _WORDS[plain[1]], plain.end()
        whole = plain[2].lstrip("-").isdigit()
        return int(plain[2]) if whole else float(plain[2]), plain.end()

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while not self._at("]", at):
            item, at = self.value(self.skip(at), depth)
            items.append(item)
            at = self._separator(at, "]")
        return items, self.skip(at) + 1

    def _string(self, at: int) -> tuple[str, int]:
        end = self.text.find(self.quote, at)
        if end < 0:
            raise _Wrong(f"a string is not closed by {self.quote}")
        return self.text[at:end], end + len(self.quote)

    def _key(self, at: int) -> tuple[str, int]:
        if self.text.startswith(self.quote, self.skip(at)):  # a key in quotes, as in JSON
            key, at = self._string(self.skip(at) + len(self.quote))
            at = self.skip(at)
            if not self._at(":", at):
                raise _Wrong(f"there is no value after {key[:20]!r}")
            return key, self.skip(at + 1)
        found = _KEY.match(self.text, at)
        if found is None:
            rest = self.text[at:].strip()
            raise _Wrong(f"expected key:value, found {rest[:20]!r}" if rest else "the arguments are not closed")
        return found[1], found.end()

    def _separator(self, at: int, closing: str) -> int:
        """After an item: behind the comma, or before the closing bracket."""
        at = self.skip(at)
        if self._at(",", at):
            return at + 1
        if self._at(closing, at):
            return at
        rest = self.text[at : at + 20]
        raise _Wrong(f"expected ',' or {closing!r}, found {rest!r}" if rest else "the arguments are not closed")

    def _at(self, sign: str, at: int) -> bool:
        return self.text.startswith(sign, self.skip(at))
