"""Images of rollouts: model inputs that belong to one sample, their batches, and thumbnails for logs.

A processor (`covey.rollout.vision`) turns text and images into tokens, some of which are placeholders of images, and
into further inputs of the model (`pixel_values`, `image_grid_thw`, `image_sizes`, ...). Their meaning depends on the
model family and is not interpreted here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 256
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """The images in a span of a rollout's tokens (a prompt, or a tool result), from one call of the processor.

    Attributes:
        images: PIL images in the order of their placeholder tokens; empty where only training needs the rest.
        tensors: inputs of the model's forward, as the processor returns them for a single sample.
        marks: per-token inputs of the model by name, [length], such as `token_type_ids`.
        start: first token of the span, counted over the rollout's prompt and completion.
        length: tokens of the span.
        short_ids: the span with each image as the single token of the chat template, which inference servers expand.

    Example:
        "<image>Hi" with an image that takes two tokens: `Media((image,), {"pixel_values": ...},
        {"token_type_ids": [1, 1, 0, 0]}, start=0, length=4, short_ids=(7, 12, 13))`
    """

    images: tuple[Any, ...]
    tensors: dict[str, Tensor]
    marks: dict[str, Tensor]
    start: int
    length: int
    short_ids: tuple[int, ...]

    def state(self) -> dict[str, Any]:
        """Everything that training needs, in plain containers and tensors; `Media(**state)` restores it."""
        trained = replace(self, images=())
        return {name: getattr(trained, name) for name in self.__slots__}


def unexpanded(ids: Sequence[int], media: Iterable[Media]) -> list[int]:
    """Tokens of a prompt (and its completion) for inference servers, each image a single token.

    Example:
        >>> unexpanded([5, 9, 9, 9, 6], [Media((), {}, {}, start=1, length=3, short_ids=(7,))])
        [5, 7, 6]
    """
    short: list[int] = []
    end = 0
    for item in sorted(media, key=lambda item: item.start):
        short += [*ids[end : item.start], *item.short_ids]
        end = item.start + item.length
    return [*short, *ids[end:]]


def images_of(media: Iterable[Media]) -> list[Any]:
    """PIL images in the order of their placeholder tokens."""
    return [image for item in sorted(media, key=lambda item: item.start) for image in item.images]


def media_inputs(rows: Sequence[Sequence[Media]], width: int, device: torch.device) -> dict[str, Tensor]:
    """Image inputs of a forward pass over padded sequences that begin at column 0.

    Inputs of several samples are concatenated along their first dimension, in the order of the sequences. Where other
    dimensions differ (tiles of an image, images of a sample) the smaller are padded with zeros, as processors do:
    models recognise padding by `image_sizes`, a mask or the zeros.

    Args:
        rows: the media of each sequence, which may be empty.
        width: columns of the padded sequences.
        device: device of the inputs.

    Returns:
        Inputs by name; empty where no sequence has images. Marks are [sequences, width], 0 outside the media.
    """
    items = [item for media in rows for item in media]
    names = dict.fromkeys(name for item in items for name in item.tensors)
    inputs = {
        name: _stacked([item.tensors[name] for item in items if name in item.tensors]).to(device) for name in names
    }
    for name in dict.fromkeys(name for item in items for name in item.marks):
        marks = torch.zeros(len(rows), width, dtype=torch.long)
        for row, media in enumerate(rows):
            for item in media:
                if name in item.marks:
                    marks[row, item.start : item.start + item.length] = item.marks[name]
        inputs[name] = marks.to(device)
    return inputs


def stray_placeholders(ids: Tensor, rows: Sequence[Sequence[Media]], placeholders: Tensor) -> Tensor:
    """Mask of placeholder tokens without an image, [sequences, width]: a policy may sample one.

    Args:
        ids: padded sequences that begin at column 0.
        rows: the media of each sequence.
        placeholders: placeholder tokens of images, [any number].
    """
    strays = torch.isin(ids, placeholders)
    for row, media in enumerate(rows):
        for item in media:
            strays[row, item.start : item.start + item.length] = False
    return strays


@contextmanager
def reading(embedding: nn.Module, ids: Tensor, strays: Tensor, filler: int) -> Iterator[Tensor]:
    """Context for a forward pass on the tokens that it yields, with stray placeholders as ordinary tokens.

    A model looks for the image of each placeholder, and a sampled placeholder has none. Engines continue from it as
    from any other token, so the model is given `filler` in its place, with the embedding of the real token.

    Args:
        embedding: the model's input embedding.
        ids: tokens, [sequences, width].
        strays: [sequences, width] bool, from `stray_placeholders`.
        filler: any token that is no placeholder.
    """
    if not strays.any():
        yield ids
        return

    def real(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (ids, *args[1:]) if args and args[0].shape == ids.shape else None

    hook = embedding.register_forward_pre_hook(real)
    try:
        yield ids.masked_fill(strays, filler)
    finally:
        hook.remove()


def placeholder_ids(config: Any) -> list[int]:
    """Placeholder tokens of images and videos in a model's configuration; empty for a text model."""
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video") for suffix in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and token >= 0)


def thumbnails(images: Iterable[Any], cache: dict[int, bytes] | None = None) -> list[bytes]:
    """PIL images as PNG files of at most `LARGEST` pixels on a side.

    Args:
        images: in order.
        cache: files by `id` of the image, for images that several rollouts show. The images must stay alive.
    """
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


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, the others padded with zeros to the largest."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    filled = []
    for part in parts:
        if list(part.shape[1:]) != largest:
            whole = part.new_zeros(part.shape[0], *largest)
            whole[(slice(None), *(slice(size) for size in part.shape[1:]))] = part
            part = whole
        filled.append(part)
    return torch.cat(filled)
