"""Conversion of a dataset's prompts to conversations, with a system message if one is given."""

from typing import Any


def as_user_messages(rows: Any) -> Any:
    """The dataset or rows, in which each prompt that is text becomes a message of the user."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row.get("prompt")
        return {"prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    return rows.map(changed) if hasattr(rows, "map") else [{**row, **changed(row)} for row in rows]


def with_system_message(text: str | None, rows: Any) -> Any:
    """The dataset or rows, in which each prompt becomes messages that begin with a system message."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not messages or messages[0]["role"] == "system":
            return {"prompt": messages}
        parts = isinstance(messages[0]["content"], list)  # text and images; one column holds one kind of content
        content = [{"type": "text", "text": text}] if parts else text
        return {"prompt": [{"role": "system", "content": content}, *messages]}

    if not text or rows is None:
        return rows
    return rows.map(changed) if hasattr(rows, "map") else [{**row, **changed(row)} for row in rows]
