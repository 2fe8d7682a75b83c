"""Tool calls as the policy wrote them, and functions that find them in the text of a turn in linear time."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """A call as the policy wrote it; its tool and its arguments (JSON values) are not checked yet."""

    name: str
    arguments: dict[str, Any]
    # Text of each argument, if the notation has no types: the tool's schema decides which value it is.
    texts: dict[str, str] | None = field(default=None, compare=False, repr=False)
    call_id: str | None = field(default=None, compare=False, repr=False)  # written by the policy; the result repeats it


@dataclass(slots=True)
class MalformedCall:
    """Text that was meant as a call and cannot be read; the reason is written for the policy, which may correct it."""

    text: str
    reason: str


@dataclass(slots=True)
class AssistantTurn:
    """One turn of the policy, parsed; the content is the text outside of calls, thinking included."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)

    @property
    def asks(self) -> bool:
        return bool(self.calls or self.malformed)


class Unreadable(str):
    """Reason why a text is not JSON; a separate type, because any other value could be the JSON value itself."""


MAX_DEPTH = 64  # arguments nested deeper than this are refused: copying and printing them later is recursive

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # as Mistral's templates demand; other ids could hold control tokens


def read_call(value: Any) -> ToolCall | str:
    """A JSON value as a call, or the reason why it is not one; several spellings of the keys are accepted."""
    if not isinstance(value, dict):
        return f"a call must be a JSON object with 'name' and 'arguments', not {_type(value)}"
    call_id = value.get("id")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        return "the call has no 'name'"
    arguments: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), None)
    if isinstance(arguments, str):
        arguments = decode_json(arguments) if arguments.strip() else {}
        if isinstance(arguments, Unreadable):
            return f"the arguments of {name} are no JSON: {arguments}"
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be a JSON object with a value for each name, not {_type(arguments)}"
    known = isinstance(call_id, str) and _CALL_ID.fullmatch(call_id)
    return ToolCall(name, arguments, call_id=call_id if known else None)


def decode_json(text: str) -> Any:
    """The JSON value that `text` is, or `Unreadable`. Line breaks within strings are accepted: policies write them."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    except RecursionError:
        return Unreadable("it is nested too deeply")
    except ValueError as error:  # JSONDecodeError, or a number of more digits than Python reads
        return Unreadable(str(error))
    if _is_deeper(value, MAX_DEPTH):
        return Unreadable("it is nested too deeply")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Unreadable("a string in it holds half of a surrogate pair")
    return value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _is_deeper(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def _type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


# --- spans of a turn that hold calls ---------------------------------------------------------------------------------

Part = ToolCall | MalformedCall
Span = tuple[int, int, list[Part]]  # (begin, end, calls) of a piece of the text that is not content

# A string literal (to the end of the text if it is not closed), or a bracket. Possessive, so that nothing is retried.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_PAIRS = {"]": "[", "}": "{"}
_SPACE = re.compile(r"\s*+")
_SCANS = 8


class Scanner:
    """Finds JSON values in one text; all scans together read each character at most about eight times."""

    def __init__(self, text: str):
        self.text = text
        self.budget = _SCANS * len(text)

    def end_of_value(self, start: int) -> int | None:
        """End of the object or list that begins at `start`; None if it is not closed."""
        open_brackets: list[str] = []
        limit = min(len(self.text), start + self.budget)
        end, closed = limit, False
        for token in _BRACKETS.finditer(self.text, start, limit):
            bracket = token[0]
            if bracket in "[{":
                open_brackets.append(bracket)
            elif bracket in _PAIRS:
                matches = bool(open_brackets) and open_brackets.pop() == _PAIRS[bracket]
                if not matches or not open_brackets:
                    end, closed = token.end(), matches
                    break
        self.budget -= end - start
        return end if closed else None

    def value(self, start: int) -> tuple[Any, int] | None:
        """The value at `start` (or `Unreadable`) and its end; None if no object or list begins and ends there."""
        if not self.text.startswith(("{", "["), start):
            return None
        end = self.end_of_value(start)
        return None if end is None else (decode_json(self.text[start:end]), end)

    def skip_space(self, start: int) -> int:
        found = _SPACE.match(self.text, start)
        return found.end() if found else start


class Finder:
    """`text.find(mark, start)` for increasing positions, which reads the text only once in total."""

    def __init__(self, text: str, mark: str):
        self.text, self.mark, self.found = text, mark, text.find(mark)

    def __call__(self, start: int) -> int:
        """The first position of the mark from `start` on; the length of the text if there is none."""
        if 0 <= self.found < start:
            self.found = self.text.find(self.mark, start)
        return self.found if self.found >= 0 else len(self.text)


def calls_between(text: str, opening: str, closing: str, read: Callable[[str], list[Part]]) -> AssistantTurn:
    """A turn with calls between two marks. Marks inside JSON strings are ignored; the last mark may be missing."""
    scanner, openings, closings = Scanner(text), Finder(text, opening), Finder(text, closing)

    def read_at(start: int) -> tuple[int, list[Part]]:
        inner = scanner.skip_space(start + len(opening))
        end = scanner.end_of_value(inner) if text.startswith(("{", "["), inner) else None
        if end is None:
            body_end = min(openings(inner), closings(inner))
        elif closings(end) == len(text) or openings(end) < closings(end):
            body_end = end  # its closing mark is missing
        else:
            body_end = closings(end)
        stop = body_end + len(closing) if text.startswith(closing, body_end) else body_end
        return stop, read(text[inner:body_end].strip())

    return calls_at(text, openings, read_at, answer_start(text))


def calls_at(
    text: str, find: Callable[[int], int], read: Callable[[int], tuple[int, list[Part]]], start: int
) -> AssistantTurn:
    """A turn with calls at the positions that `find` returns; `read` returns the end and content of one call."""
    spans: list[Span] = []
    begin = find(start)
    while begin < len(text):
        end, parts = read(begin)
        spans.append((begin, end, parts))
        begin = find(end)
    return turn_without(text, spans)


def turn_without(text: str, spans: list[Span]) -> AssistantTurn:
    """The turn whose content is the text outside of the spans, which are in order."""
    turn, outside, position = AssistantTurn(""), [], 0
    for start, stop, parts in spans:
        outside.append(text[position:start])
        position = stop
        turn.calls += [part for part in parts if isinstance(part, ToolCall)]
        turn.malformed += [part for part in parts if isinstance(part, MalformedCall)]
    turn.content = "".join([*outside, text[position:]]).strip()
    return turn


def answer_start(text: str, opening: str = "<think>", closing: str = "</think>") -> int:
    """Position after thinking, within which calls do not count; the length of the text if thinking never ends."""
    closed = text.find(closing)
    if closed >= 0:
        return closed
    return len(text) if text.lstrip().startswith(opening) else 0


def calls_in(value: Any, text: str) -> list[Part]:
    """Calls in a JSON value (or `Unreadable`): one, or one per item of a list. `text` is quoted in errors."""
    if isinstance(value, Unreadable):
        return [MalformedCall(text, f"the call is no JSON: {value}")]
    calls = [read_call(item) for item in (value if isinstance(value, list) else [value])]
    return [MalformedCall(text, call) if isinstance(call, str) else call for call in calls]


def named_call(name: str, arguments: str, text: str, call_id: str = "") -> Part:
    (call,) = calls_in({"name": name, "arguments": arguments, "id": call_id}, text)
    return call
