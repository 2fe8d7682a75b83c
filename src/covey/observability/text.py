"""Prompts and completions as text for people, long ones shortened in the middle."""

import json
from typing import Any


def as_text(value: Any) -> str:
    """What a reader should see of a prompt or completion: text, or messages as `role: content`.

    A lone assistant message is its content: that is what the policy wrote.

    Example:
        >>> as_text([{"role": "user", "content": "2+2?"}])
        'user: 2+2?'
        >>> as_text([{"role": "assistant", "content": "4"}])
        '4'
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return str(value)
    if len(value) == 1 and value[0].get("role") == "assistant" and not value[0].get("tool_calls"):
        return _content(value[0].get("content"))
    return "\n".join(_message(message) for message in value)


def _message(message: dict[str, Any]) -> str:
    text = f"{message.get('role', 'message')}: {_content(message.get('content'))}".rstrip()
    calls = [json.dumps(call, ensure_ascii=False, default=str) for call in message.get("tool_calls") or []]
    return "\n".join([text, *(f"  calls {call}" for call in calls)])


def _content(content: Any) -> str:
    """The text of a message's content; a part that is no text is named by its type."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(
            str(part["text"]) if isinstance(part, dict) and "text" in part else f"<{_kind(part)}>" for part in content
        )
    return str(content)


def _kind(part: Any) -> str:
    return str(part.get("type", "part")) if isinstance(part, dict) else type(part).__name__


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
