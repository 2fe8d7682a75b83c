"""Notations in XML tags: arguments are plain text (`ToolCall.texts`), and the tool's schema decides what they are."""

import re
from bisect import bisect_left

from covey.rollout.tools import calls
from covey.rollout.tools.tool import from_text

_CALL = re.compile(r"<tool_call>|<function=")
_OPENING = re.compile(r"(?:<tool_call>\s*+)?(?:<function=)?")
_FUNCTION = re.compile(r"(?:<tool_call>\s*+)?<function=([^<>\n]*+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]*+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</?function|</?tool_call>|\Z))")
_CALL_END = re.compile(r"\s*+(?:</function>(?:\s*+</tool_call>)?|</tool_call>|(?=<tool_call>|<function=)|\Z)")
_RESUME = re.compile(r"</tool_call>|</function>(?:\s*+</tool_call>)?|(?=<tool_call>|<function=)")


def parse_qwen3_coder(text: str) -> calls.AssistantTurn:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, once for each call.

    A value ends at the `</parameter>` that a further tag follows, so that it may hold the tag itself. The tags around
    `<function=...>` and its end may be missing. A line break at either end of a value is layout.
    """
    ends = [end.span() for end in _VALUE_END.finditer(text)]

    def find(start: int) -> int:
        found = _CALL.search(text, start)
        return found.start() if found else len(text)

    return calls.calls_at(text, find, lambda at: _read_qwen3_coder(text, at, ends), calls.answer_start(text))


def _read_qwen3_coder(text: str, start: int, ends: list[tuple[int, int]]) -> tuple[int, list[calls.Part]]:
    """End and content of the call at `start`; `ends` are the positions where a value may end."""
    head = _FUNCTION.match(text, start)
    if head is None or not head[1].strip():
        opening = _OPENING.match(text, start)
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


def _untyped_call(name: str, texts: dict[str, str]) -> list[calls.Part]:
    return [calls.ToolCall(name, {key: from_text(value, {}) for key, value in texts.items()}, texts)]


def _malformed(
    text: str, start: int, read: int, reason: str, resume: re.Pattern[str] = _RESUME
) -> tuple[int, list[calls.Part]]:
    """A call that cannot be read beyond `read`: it extends to a tag behind which other calls may be read."""
    after = resume.search(text, read)
    stop = after.end() if after else len(text)
    return stop, [calls.MalformedCall(text[start:stop], reason)]


GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_NAME = re.compile(r"<tool_call>\s*+([^\s<>{}]++)\s*+")
_GLM_KEY = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
_GLM_END = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_GLM_RESUME = re.compile(r"</tool_call>|(?=<tool_call>)")


def parse_glm(text: str) -> calls.AssistantTurn:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` (GLM 4.5 on), once a call."""
    openings, value_ends = calls.Finder(text, "<tool_call>"), calls.Finder(text, "</arg_value>")
    return calls.calls_at(text, openings, lambda at: _read_glm(text, at, value_ends), calls.answer_start(text))


def _read_glm(text: str, start: int, value_ends: calls.Finder) -> tuple[int, list[calls.Part]]:
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
