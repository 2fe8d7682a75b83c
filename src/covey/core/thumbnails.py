"""Small pictures for logs."""

from collections.abc import Iterable
from io import BytesIO
from typing import Any

LARGEST = 256
"""Pixels of a thumbnail's longer side."""


def thumbnails(images: Iterable[Any], known: dict[int, bytes] | None = None) -> list[bytes]:
    """PIL images as PNG files of at most `LARGEST` pixels on a side.

    Args:
        images: in order.
        known: what was made before, by `id` of the image; siblings show the same ones. The images must live on.
    """
    known = {} if known is None else known
    made = []
    for image in images:
        if id(image) not in known:
            known[id(image)] = _thumbnail(image)
        made.append(known[id(image)])
    return made


def _thumbnail(image: Any) -> bytes:
    small, data = image.copy(), BytesIO()
    small.thumbnail((LARGEST, LARGEST))
    small.save(data, "PNG")
    return data.getvalue()
