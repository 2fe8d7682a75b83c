"""Tool calls as the policy wrote them: calls, malformed calls, and the turn that holds them."""

import json
import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """A call as the policy wrote it; its tool and its arguments are not checked yet.

    Attributes:
        name: of the tool.
        arguments: by name, as JSON values.
        texts: the text of each argument, where the notation has no types; the tool's schema decides what it is.
        call_id: the policy's own id of the call, nine letters and digits, which its result repeats.
    """

    name: str
    arguments: dict[str, Any]
    texts: dict[str, str] | None = field(default=None, compare=False, repr=False)
    call_id: str | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class MalformedCall:
    """Text that was meant as a call and cannot be read.

    Attributes:
        text: as the policy wrote it.
        reason: the mistake, worded so that the policy can correct it.
    """

    text: str
    reason: str


@dataclass(slots=True)
class AssistantTurn:
    """One turn of the policy, parsed.

    Attributes:
        content: the text outside of calls, thinking included, without white space around it.
        calls: in the order in which they were written.
        malformed: likewise.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)

    @property
    def asks(self) -> bool:
        """True where tools have to answer, if only with an error."""
        return bool(self.calls or self.malformed)


class Unreadable(str):
    """Reason why a text is no JSON; a type of its own, since every other value may be JSON."""


MAX_DEPTH = 64
"""Arguments nested deeper than this are refused: copying and printing them later is recursive."""

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""As Mistral's templates demand; other ids may hold anything, control tokens too."""


def read_call(value: Any) -> ToolCall | str:
    """A JSON value as a call, or the reason why it is none.

    Known shapes: `{"name", "arguments"}`, with `parameters` or `args` for `arguments`, and the same below a key
    `function`, as OpenAI's interface has it. Arguments may be an object or a string that holds one.
    """
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
    return ToolCall(
        name, arguments, call_id=call_id if isinstance(call_id, str) and _CALL_ID.fullmatch(call_id) else None
    )


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
