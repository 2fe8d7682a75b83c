"""What a tool returned, as the content of a message: text, or text and images."""

import dataclasses
import json
import sys
from typing import Any

Content = str | list[dict[str, Any]]
"""A text, or parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`."""


def content_of(result: Any, limit: int) -> Content:
    """Render a result of any type.

    Strings stay as they are; what JSON can hold is written as JSON, data classes too; anything else by `str`. Images,
    and lists of images and other things, become parts.

    Args:
        result: what the tool returned.
        limit: characters of text that are kept of each part; a note says how many were left out.
    """
    if isinstance(result, list | tuple) and any(_is_image(item) or _is_part(item) for item in result):
        return [_part(item, limit) for item in result]
    return [_part(result, limit)] if _is_image(result) else text_of(result, limit)


def text_of(result: Any, limit: int) -> str:
    """A result as text that every tokenizer can encode."""
    if isinstance(result, str):
        text = result
    elif isinstance(result, bytes | bytearray):
        text = bytes(result[: 4 * limit]).decode("utf-8", "replace")
    else:
        try:
            text = json.dumps(_plain(result), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(result)
    return _cut(text, limit).encode("utf-8", "replace").decode()


def _cut(text: str, limit: int) -> str:
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[:limit]}\n[{left_out} more characters left out]"


def _plain(result: Any) -> Any:
    return dataclasses.asdict(result) if dataclasses.is_dataclass(result) and not isinstance(result, type) else result


def _part(item: Any, limit: int) -> dict[str, Any]:
    if _is_image(item):
        return {"type": "image", "image": item}
    if _is_part(item):
        return {"type": "text", "text": text_of(item["text"], limit)} if item["type"] == "text" else dict(item)
    return {"type": "text", "text": text_of(item, limit)}


def _is_part(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in ("text", "image") and item["type"] in item


def _is_image(item: Any) -> bool:
    """Whether it is a PIL image; if PIL was never imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(item, pil.Image)
