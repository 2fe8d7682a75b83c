"""What parsers are made of: stretches of a turn that are calls, and the turn that is left without them.

Not here: the notations themselves (`parsers`, `marked`) and the reading of single values (`scan`).
"""

from collections.abc import Callable
from typing import Any

from covey.rollout.tools.calls import AssistantTurn, MalformedCall, ToolCall, Unreadable, read_call
from covey.rollout.tools.json_scanner import Finder, Scanner

Part = ToolCall | MalformedCall
Span = tuple[int, int, list[Part]]
"""A stretch of the text that is no content, and the calls in it."""


def tagged(text: str, opening: str, closing: str, read: Callable[[str], list[Part]]) -> AssistantTurn:
    """Calls between two marks. A mark inside a JSON string closes nothing, and a missing last one is forgiven.

    Args:
        text: of the turn.
        opening, closing: the marks.
        read: what stands between them, without white space around it -> the calls in it.
    """
    scanner, opens, closes = Scanner(text), Finder(text, opening), Finder(text, closing)
    spans: list[Span] = []
    start = opens(answer_start(text))
    while start < len(text):
        inner = scanner.skip_space(start + len(opening))
        end = scanner.end_of_value(inner) if text.startswith(("{", "["), inner) else None
        if end is None:
            body_end = min(opens(inner), closes(inner))
        elif closes(end) == len(text) or opens(end) < closes(end):
            body_end = end  # its closing mark is missing
        else:
            body_end = closes(end)
        stop = body_end + len(closing) if text.startswith(closing, body_end) else body_end
        spans.append((start, stop, read(text[inner:body_end].strip())))
        start = opens(stop)
    return assemble(text, spans)


def assemble(text: str, spans: list[Span]) -> AssistantTurn:
    """The turn whose content is what lies outside of the spans, which are in order."""
    turn = AssistantTurn("")
    outside: list[str] = []
    position = 0
    for start, stop, parts in spans:
        outside.append(text[position:start])
        position = stop
        for part in parts:
            if isinstance(part, ToolCall):
                turn.calls.append(part)
            else:
                turn.malformed.append(part)
    outside.append(text[position:])
    turn.content = "".join(outside).strip()
    return turn


def answer_start(text: str, opening: str = "<think>", closing: str = "</think>") -> int:
    """Where thinking ends: what a policy considers calling is not a call. The whole text if thinking never ends."""
    closed = text.find(closing)
    if closed >= 0:
        return closed
    return len(text) if text.lstrip().startswith(opening) else 0


def parts_of(value: Any, text: str) -> list[Part]:
    """What a JSON value asks for: one call, or one for each item of a list.

    Args:
        value: as decoded, or `Unreadable`.
        text: what the policy wrote, for a complaint.
    """
    if isinstance(value, Unreadable):
        return [MalformedCall(text, f"the call is no JSON: {value}")]
    if isinstance(value, list):
        return [part for item in value for part in _one(item, text)]
    return _one(value, text)


def named(name: str, arguments: str, text: str, call_id: str = "") -> Part:
    """A call whose name and id stand outside of its JSON arguments."""
    return _one({"name": name, "arguments": arguments, "id": call_id}, text)[0]


def _one(value: Any, text: str) -> list[Part]:
    call = read_call(value)
    return [MalformedCall(text, call) if isinstance(call, str) else call]
