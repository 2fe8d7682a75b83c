"""Text of prompts and completions, which may be strings, or messages whose content is text, parts, or missing."""

from typing import Any

from covey.core.special_tokens import THINKING
from covey.core.transcript import as_text, entries, is_messages
from covey.runtime.safe_text import shorten


def completion_text(completion: Any) -> str:
    """Text of a completion: the string, or the assistant's last message.

    Args:
        completion: a string, or messages as `[{"role": "assistant", "content": ...}, ...]`. Of several messages (tool
            use) the last one of the assistant counts; without any, the last one.

    Example:
        >>> completion_text("4")
        '4'
        >>> completion_text([{"role": "assistant", "content": "4"}])
        '4'
        >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "4"}]}])
        '4'
        >>> completion_text([])
        ''
    """
    if isinstance(completion, str):
        return completion
    of_assistant = [message for message in completion if message.get("role") == "assistant"]
    messages = of_assistant or list(completion)
    return content_text(messages[-1].get("content")) if messages else ""


def after_thinking(text: str) -> str:
    """Text after the last closed block of thinking; the whole text if no block is closed.

    Example:
        >>> after_thinking("<think>2+2</think>4"), after_thinking("2+2</think>4"), after_thinking("4")
        ('4', '4', '4')
    """
    ends = [text.rfind(mark) + len(mark) for mark in THINKING.values() if mark in text]
    return text[max(ends, default=0) :]


def content_text(content: Any) -> str:
    """Text of one message's content: a string, text parts joined, or nothing (a bare tool call)."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content or ())


def describe_sample(prompt: Any, completion: Any) -> str:
    """Prompt and completion on two indented lines, shortened in the middle."""
    shown = [shorten(_on_one_line(one), 250) for one in (prompt, completion)]
    kind = " (a list of messages: covey.rewards.completion_text gives its text)" if is_messages(completion) else ""
    return "  prompt:     {!r}\n  completion: {!r}".format(*shown) + kind


def _on_one_line(text_or_messages: Any) -> str:
    if not is_messages(text_or_messages):
        return as_text(text_or_messages)
    shown = entries(text_or_messages)
    if len(shown) == 1:
        return content_text(text_or_messages[0].get("content"))
    return " | ".join(entry.text.strip() for entry in shown)
