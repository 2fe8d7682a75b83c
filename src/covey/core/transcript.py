"""Prompts and completions as text for people: who said what, which tools were called, what they answered.

A conversation is a list of `Entry`s; `as_text` joins all of them, `excerpt` picks what fits into so many characters.
Messages come from models, tools and users: shapes that no chat template knows are shown as they are. Not here: colours
(`covey.observability`), and what a reward function reads of a completion (`covey.rewards.text`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

FAILED = "Error: "
"""How the answer to a call begins that has no result."""

LEAST = 60
"""Characters of an entry that an excerpt shows at least, before it leaves entries out."""


class Kind(StrEnum):
    """What an entry of a conversation is."""

    SAID = "said"
    CALL = "call"
    RESULT = "result"
    FAILURE = "failure"
    GAP = "gap"
    """Entries that an excerpt leaves out."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened in a conversation, as one or more lines of text.

    Attributes:
        kind: what it is.
        text: with the name of who spoke or of what was called.
        role: of the message.
    """

    kind: Kind
    text: str
    role: str = ""


def as_text(value: Any) -> str:
    """What a reader should see of a prompt or completion: text, or a conversation entry by entry.

    A lone assistant message is its content: that is what the policy wrote.

    Example:
        >>> as_text([{"role": "user", "content": "2+2?"}])
        'user: 2+2?'
        >>> as_text([{"role": "assistant", "content": "4"}])
        '4'
        >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        >>> print(as_text([{"role": "assistant", "content": "I add.", "tool_calls": [call]},
        ...                {"role": "tool", "name": "add", "content": "4"},
        ...                {"role": "assistant", "content": "It is 4."}]))
        assistant: I add.
          → add(a=2, b=2)
          ← add: 4
        assistant: It is 4.
    """
    if isinstance(value, str):
        return value
    if not is_messages(value):
        return str(value)
    if len(value) == 1 and not is_conversation(value):
        return content_text(value[0].get("content"))
    return "\n".join(entry.text for entry in entries(value))


def is_messages(value: Any) -> bool:
    """Whether it is a list of messages, possibly empty."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def is_conversation(completion: Any) -> bool:
    """Whether a completion is more than one answer of the policy: several messages, or a call.

    Example:
        >>> is_conversation("4"), is_conversation([{"role": "assistant", "content": "4"}])
        (False, False)
    """
    if not is_messages(completion) or not completion:
        return False
    return len(completion) > 1 or completion[0].get("role") != "assistant" or bool(_calls(completion[0]))


def entries(messages: Sequence[dict[str, Any]]) -> list[Entry]:
    """A conversation as entries: a message, then the calls it makes. Results are indented; lines below them too."""
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
        found.append(Entry(Kind.SAID, f"{role}: {content}".rstrip(), role))
        found += [Entry(Kind.CALL, f"  → {_call(call)}".replace("\n", "\n    "), role) for call in _calls(message)]
    return found


def content_text(content: Any) -> str:
    """The text of a message's content; a part that is no text is named by its type.

    Example:
        >>> content_text([{"type": "image"}, {"type": "text", "text": "What is it?"}])
        '<image>What is it?'
    """
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(
            str(part["text"]) if isinstance(part, dict) and "text" in part else f"<{_type(part)}>" for part in content
        )
    return str(content)


def is_failure(message: dict[str, Any]) -> bool:
    """Whether a message tells the policy that its call has no result."""
    return message.get("role") == "tool" and content_text(message.get("content")).startswith(FAILED)


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened in a completion.

    Attributes:
        turns: messages of the policy.
        calls: tool calls it asked for, those that could not be read included.
        failed_calls: calls that were answered with an error.
    """

    turns: int
    calls: int
    failed_calls: int


def count(completion: Any) -> Counts:
    """Count turns and calls; a completion that is a text is one turn.

    A call that could not be read stands in no message of the policy, but has an answer: a turn made as many calls as it
    holds, or as were answered, whichever is more.

    Example:
        >>> failed = {"role": "tool", "name": "tool", "content": "Error: the call could not be read: ..."}
        >>> count([{"role": "assistant", "content": ""}, failed, {"role": "assistant", "content": "I give up."}])
        Counts(turns=2, calls=1, failed_calls=1)
    """
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
    """Messages for programs; an image is an object with its size in place of its pixels."""
    try:
        return json.dumps(list(messages), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or a message within itself
        plain = [{"role": str(one.get("role")), "content": content_text(one.get("content"))} for one in messages]
        return json.dumps(plain, ensure_ascii=False)


# ---- less of it ------------------------------------------------------------------------------------------------------


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the beginning and the end, with an ellipsis for what is left out between.

    Example:
        >>> shorten("a long story", 7)
        'a l…ory'
    """
    if len(text) <= width:
        return text
    head = width // 2
    tail = width - head - 1
    return text[:head] + "…" + (text[-tail:] if tail > 0 else "")


def excerpt(conversation: Sequence[Entry], width: int) -> list[Entry]:
    """About `width` characters of a conversation: long entries shortened in the middle, less telling ones left out.

    The first call, the last word of the policy and the end are always there and get twice the room of others; next come
    its beginning and the first failure.

    Example:
        >>> said = [Entry(Kind.SAID, f"user: {number}") for number in range(9)]
        >>> [entry.text for entry in excerpt(said, 40)]
        ['user: 0', 'user: 1', '  … 6 more', 'user: 8']
    """
    order, vital = _by_interest(conversation)
    weights = {place: 2 if rank < vital else 1 for rank, place in enumerate(order)}
    kept = max(vital, min(len(order), width // 6))  # no entry is shorter
    while kept > vital and _room(conversation, sorted(order[:kept]), weights, width) < LEAST:
        kept -= 1
    places = sorted(order[:kept])
    room = max(_room(conversation, places, weights, width), 1)
    shown: list[Entry] = []
    for place, before in zip(places, [-1, *places], strict=False):
        if place > before + 1:
            shown.append(Entry(Kind.GAP, f"  … {place - before - 1} more"))
        entry = conversation[place]
        shown.append(replace(entry, text=shorten(entry.text, room * weights[place])))
    return shown


def _by_interest(conversation: Sequence[Entry]) -> tuple[list[int], int]:
    """All places, the most telling first, and how many of them no excerpt leaves out."""
    size = len(conversation)
    first = {entry.kind: place for place, entry in reversed(list(enumerate(conversation)))}
    said = [place for place, entry in enumerate(conversation) if entry.kind is Kind.SAID and entry.role != "user"]
    inwards = [place for pair in zip(range(size), reversed(range(size)), strict=True) for place in pair]
    vital = {size - 1, *said[-1:], first.get(Kind.CALL, 0)} if size else set()
    wanted = [*sorted(vital), 0, first.get(Kind.FAILURE, 0), first.get(Kind.RESULT, 0), *inwards]
    return (list(dict.fromkeys(wanted)) if size else []), len(vital)


def _room(conversation: Sequence[Entry], places: list[int], weights: dict[int, int], width: int) -> int:
    """Characters that an entry of weight 1 may have, if what shorter ones need less goes to the others."""
    gaps = sum(after > before + 1 for before, after in zip([-1, *places], places, strict=False))
    left = width - len(places) - 12 * gaps
    total = sum(weights[place] for place in places)
    for place in sorted(places, key=lambda place: len(conversation[place].text) / weights[place]):
        length = len(conversation[place].text)
        if length * total > left * weights[place]:
            return left // total
        left, total = left - length, total - weights[place]
    return max(width, LEAST)


# ---- parts of messages -----------------------------------------------------------------------------------------------


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else [calls] if calls else []


def _call(call: Any) -> str:
    """`name(argument=value, ...)`, or whatever stands in the place of a call."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or "name" not in function:
        return _as_json(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI's interface has it
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


def _type(part: Any) -> str:
    return str(part.get("type", "part")) if isinstance(part, dict) else type(part).__name__
