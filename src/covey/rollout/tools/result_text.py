"""Rendering of tool results as the content of a message: text, or text and images.

A result may be of any size, nested without end, or broken: rendering stops as soon as there is more text than is
shown. It runs the result's own code (`__str__`, `__repr__`), so call it under the tool's deadline.
"""

import collections
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

Content = str | list[dict[str, Any]]
"""A text, or parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`."""

BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    collections.deque: ("deque([", "])"),
}
MAX_DEPTH = 50
"""Containers that JSON cannot hold are shown down to this depth."""
MAX_PARTS = 1000
"""Members of a list that are looked at for images, and shown if there are any."""


def content_of(result: Any, limit: int) -> Content:
    """Render a result of any type.

    Strings stay as they are; what JSON can hold is written as JSON, data classes too; anything else by `str`. Images,
    and lists of images and other things, become parts.
    """
    parts = parts_of(result, limit)
    return text_of(result, limit) if parts is None else parts


def parts_of(result: Any, limit: int) -> list[dict[str, Any]] | None:
    """An image, or a list that holds images or parts, as parts; None for anything else."""
    if isinstance(result, list | tuple):
        first = list(islice(result, MAX_PARTS))
        return [_part(item, limit) for item in first] if any(_is_image(one) or _is_part(one) for one in first) else None
    return [_part(result, limit)] if _is_image(result) else None


def text_of(result: Any, limit: int) -> str:
    """A result as text that every tokenizer can encode."""
    whole = True
    if isinstance(result, str):
        text = str.__str__(result)
    elif isinstance(result, bytes | bytearray):
        text = bytes(result[: 4 * limit + 4]).decode("utf-8", "replace")
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the tool returned a generator instead of a result; let it return a list or a string")
    else:
        text, whole = _printed(result, limit)
    return _cut(text, limit, whole).encode("utf-8", "replace").decode()


def _cut(text: str, limit: int, whole: bool) -> str:
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    return f"{text[:limit]}\n[{f'{left_out} ' if whole else ''}more characters left out]"


def _printed(result: Any, limit: int) -> tuple[str, bool]:
    """Text as JSON, or else by `str`, not far beyond `limit`; and True if that is all of it."""
    # Written piece by piece in Python: a deadline can stop that, and it may be left in the middle.
    written = json.JSONEncoder(ensure_ascii=False, default=_plain).iterencode(result)
    try:
        return _take(written, 4 * limit)
    except (TypeError, ValueError, RecursionError):
        return _take(_shown(result), 4 * limit)


def _take(pieces: Iterator[str], limit: int) -> tuple[str, bool]:
    """The first pieces with at least `limit` characters, and True if these are all."""
    taken: list[str] = []
    length = 0
    for piece in pieces:
        taken.append(piece)
        length += len(piece)
        if length > limit:
            return "".join(taken), False
    return "".join(taken), True


def _plain(result: Any) -> Any:
    """A data class as a dictionary, one level at a time."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    raise TypeError(f"JSON cannot hold {type(result).__name__}")


def _shown(value: Any, above: tuple[int, ...] = ()) -> Iterator[str]:
    """Pieces of `str(value)`."""
    kind = type(value)
    if kind is not dict and kind not in BRACKETS:
        yield str.__str__(repr(value) if above else str(value))
        return
    if id(value) in above or len(above) == MAX_DEPTH:
        yield "..."
        return
    above = (*above, id(value))
    left, right = BRACKETS.get(kind, ("{", "}"))
    yield left
    for number, item in enumerate(value):
        yield ", " if number else ""
        yield from _shown(item, above)
        if kind is dict:
            yield ": "
            yield from _shown(value[item], above)
    yield ",)" if kind is tuple and len(value) == 1 else right


def _part(item: Any, limit: int) -> dict[str, Any]:
    if _is_image(item):
        return {"type": "image", "image": item}
    if _is_part(item):
        return {"type": "text", "text": text_of(item["text"], limit)} if item["type"] == "text" else dict(item)
    return {"type": "text", "text": text_of(item, limit)}


def _is_part(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in ("text", "image") and item["type"] in item


def _is_image(item: Any) -> bool:
    """True for a PIL image; False if PIL was never imported."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(item, pil.Image)
