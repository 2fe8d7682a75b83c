"""Prompts and completions as text; messages of an unknown form are shown unchanged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

FAILED = ("{'error': ", "Error: ")  # prefixes of tool messages that report a failed call: Covey's, and other libraries'


class Kind(StrEnum):
    """Kind of an entry."""

    MESSAGE = "message"
    CALL = "call"
    RESULT = "result"
    FAILURE = "failure"
    GAP = "gap"  # omitted entries of an excerpt


@dataclass(frozen=True, slots=True)
class Entry:
    """A message, tool call or result, as one or more lines of text."""

    kind: Kind
    text: str  # with the role, or the name of the tool
    role: str = ""  # role of the message


def as_text(value: Any) -> str:
    """Text of a prompt or completion: the text itself, the content of a single answer, or a conversation line by line.

    Example:
        >>> as_text([{"role": "user", "content": "2+2?"}]), as_text([{"role": "assistant", "content": "4"}])
        ('user: 2+2?', '4')
        >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        >>> print(as_text([{"role": "assistant", "content": "I add.", "tool_calls": [call]},
        ...                {"role": "tool", "name": "add", "content": "4"}]))
        assistant: I add.
          → add(a=2, b=2)
          ← add: 4
    """
    if isinstance(value, str):
        return value
    if not is_messages(value):
        return str(value)
    if len(value) == 1 and not is_conversation(value):
        return content_text(value[0].get("content"))
    return "\n".join(entry.text for entry in entries(value))


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def is_conversation(completion: Any) -> bool:
    """True if a completion is more than one answer of the policy: several messages, or a call."""
    if not is_messages(completion) or not completion:
        return False
    return len(completion) > 1 or completion[0].get("role") != "assistant" or bool(_calls(completion[0]))


def entries(messages: Sequence[dict[str, Any]]) -> list[Entry]:
    """A conversation as entries: each message, then its tool calls; all lines of calls and results are indented."""
    found = []
    for message in messages:
        role = str(message.get("role", "message"))
        content = content_text(message.get("content"))
        if role == "tool":
            kind, mark = (Kind.FAILURE, "✗") if is_failure(message) else (Kind.RESULT, "←")
            name = message.get("name")
            text = f"  {mark} {f'{name}: ' if name else ''}{content}".rstrip().replace("\n", "\n    ")
            found.append(Entry(kind, text, role))
            continue
        found.append(Entry(Kind.MESSAGE, f"{role}: {content}".rstrip(), role))
        found += [Entry(Kind.CALL, f"  → {_call(call)}".replace("\n", "\n    "), role) for call in _calls(message)]
    return found


def content_text(content: Any) -> str:
    """Text of a message's content; parts that are not text are named by type, as in "<image>What is it?"."""
    if content is None:
        return ""
    if isinstance(content, list):
        known = [part if isinstance(part, dict) else {"text": part} for part in content]
        return "".join(str(part["text"]) if "text" in part else f"<{part.get('type', 'part')}>" for part in known)
    return str(content)


def without_none(value: Any) -> Any:
    """A copy without dictionary keys whose value is None: Arrow tables add None for keys that only other rows have.

    Example:
        >>> without_none({"x": 1, "y": None, "z": [{"a": None}, None]})
        {'x': 1, 'z': [{}, None]}
    """
    if isinstance(value, dict):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_none(one) for one in value]
    return value


def is_failure(message: dict[str, Any]) -> bool:
    return message.get("role") == "tool" and content_text(message.get("content")).startswith(FAILED)


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of turns and tool calls in a completion."""

    turns: int  # messages of the policy
    calls: int  # its tool calls, including those that could not be parsed
    failed_calls: int  # calls that were answered with an error


class RolloutSummary(NamedTuple):
    """One rollout's row of the completions table, which the first process writes for all processes."""

    length: int  # sampled tokens
    prompt: Any  # text or messages
    completion: Any
    finish: str  # a `FinishReason`
    counts: Counts  # turns and calls
    error: str | None  # of a rollout that failed
    images: list[bytes]  # small PNG files
    extras: dict[str, Any]  # by column: values that reward functions logged, and `solution`
    entropy: float | None  # mean over its sampled tokens, in nats; None if unknown


def count(completion: Any) -> Counts:
    """Count turns and calls. A text completion is one turn; a call that could not be parsed counts by its answer."""
    if not is_messages(completion):
        return Counts(1, 0, 0)
    turns = calls = asked = answered = 0
    for message in completion:
        if message.get("role") == "assistant":
            turns, calls = turns + 1, calls + max(asked, answered)
            asked, answered = len(_calls(message)), 0
        answered += message.get("role") == "tool"
    return Counts(turns, calls + max(asked, answered), sum(map(is_failure, completion)))


def to_json(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as JSON; an image becomes an object with its size, and content that JSON cannot hold becomes text."""
    try:
        return json.dumps(list(messages), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys other than text, or a cyclic message
        plain = [{"role": str(m.get("role")), "content": content_text(m.get("content"))} for m in messages]
        return json.dumps(plain, ensure_ascii=False)


# ---- parts of messages -----------------------------------------------------------------------------------------------


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else [calls] if calls else []


def _call(call: Any) -> str:
    """`name(argument=value, ...)`, or the JSON of anything else."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or "name" not in function:
        return _as_json(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # the form of OpenAI's API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"{function['name']}({arguments})"
    if not isinstance(arguments, dict):
        return f"{function['name']}({'' if arguments is None else _as_json(arguments)})"
    return f"{function['name']}({', '.join(f'{name}={_as_json(value)}' for name, value in arguments.items())})"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def _plain(value: Any) -> Any:
    size = getattr(value, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return {"type": type(value).__name__, "size": list(size)}
    return f"<{type(value).__name__}>"
