"""Excerpts of long conversations and thumbnails of images, for display."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

from covey.core.transcript import Entry, Kind
from covey.runtime.safe_text import shorten

LEAST = 60  # minimum characters of an entry in an excerpt; below it, entries are omitted
LARGEST = 256  # pixels of a thumbnail's longer side


def excerpt(conversation: Sequence[Entry], width: int) -> list[Entry]:
    """About `width` characters of a conversation: long entries shortened in the middle, less informative ones omitted.

    The first call, the policy's last message and the last entry are always included, with twice the width of others;
    next come the first entry and the first failure.
    """
    order, required = _by_interest(conversation)
    weights = {index: 2 if rank < required else 1 for rank, index in enumerate(order)}
    count = max(required, min(len(order), width // 6))  # no entry is shorter
    while count > required and _unit_width(conversation, sorted(order[:count]), weights, width) < LEAST:
        count -= 1
    indexes = sorted(order[:count])
    unit = max(_unit_width(conversation, indexes, weights, width), 1)
    excerpted: list[Entry] = []
    for index, before in zip(indexes, [-1, *indexes], strict=False):
        if index > before + 1:
            excerpted.append(Entry(Kind.GAP, f"  … {index - before - 1} more"))
        entry = conversation[index]
        excerpted.append(replace(entry, text=shorten(entry.text, unit * weights[index])))
    return excerpted


def _by_interest(conversation: Sequence[Entry]) -> tuple[list[int], int]:
    """Indexes of all entries, the most informative first, and how many of them every excerpt includes."""
    size = len(conversation)
    if not size:
        return [], 0
    first = {entry.kind: index for index, entry in reversed(list(enumerate(conversation)))}
    answers = [i for i, entry in enumerate(conversation) if entry.kind is Kind.MESSAGE and entry.role != "user"]
    inwards = [index for pair in zip(range(size), reversed(range(size)), strict=True) for index in pair]
    required = {size - 1, *answers[-1:], first.get(Kind.CALL, 0)}
    order = [*sorted(required), 0, first.get(Kind.FAILURE, 0), first.get(Kind.RESULT, 0), *inwards]
    return list(dict.fromkeys(order)), len(required)


def _unit_width(conversation: Sequence[Entry], indexes: list[int], weights: dict[int, int], width: int) -> int:
    """Characters for an entry of weight 1; entries that are shorter leave the rest to the others."""
    gaps = sum(after > before + 1 for before, after in zip([-1, *indexes], indexes, strict=False))
    left = width - len(indexes) - 12 * gaps
    total = sum(weights[index] for index in indexes)
    for index in sorted(indexes, key=lambda index: len(conversation[index].text) / weights[index]):
        length = len(conversation[index].text)
        if length * total > left * weights[index]:
            return left // total
        left, total = left - length, total - weights[index]
    return max(width, LEAST)


def thumbnails(images: Iterable[Any], cache: dict[int, bytes] | None = None) -> list[bytes]:
    """PNG files of PIL images, at most `LARGEST` pixels on a side; `cache` by `id` of images that stay alive."""
    cache = {} if cache is None else cache
    files = []
    for image in images:
        if id(image) not in cache:
            small, data = image.copy(), BytesIO()
            small.thumbnail((LARGEST, LARGEST))
            small.save(data, "PNG")
            cache[id(image)] = data.getvalue()
        files.append(cache[id(image)])
    return files
