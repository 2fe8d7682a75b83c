"""Images in a rollout as the model is given them: tensors that stay opaque and belong to one sample.

A processor turns text and images into tokens, some of which stand for images, and into further inputs of the model
(`pixel_values`, `image_grid_thw`, `image_sizes`, ...). What those mean differs by family and is nobody's business here;
what is known is how the inputs of several samples become those of a batch. Not here: reading images and calling
processors (`covey.rollout.vision`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """The images in a stretch of a rollout's tokens (a prompt, or what a tool answered), as one call of the processor.

    Attributes:
        images: PIL images in the order of the tokens that stand for them; empty where only training needs the rest.
        tensors: inputs of the model's forward, as the processor returns them for a single sample.
        marks: by name, what the model is told about each token of the stretch, [length] (which ones are images).
        start: of the stretch among the tokens of the rollout's prompt and completion.
        length: tokens of the stretch.
        short_ids: the same stretch with each image as the one token that the chat template writes: what inference
            servers are sent, which expand it themselves.

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
        """What training needs, in plain containers and tensors: `Media(**media.state())` trains alike."""
        kept = replace(self, images=())
        return {name: getattr(kept, name) for name in self.__slots__}


def unexpanded(ids: Sequence[int], media: Iterable[Media]) -> list[int]:
    """Tokens of a prompt (and what followed it) as inference servers are sent them, each image a single token.

    Example:
        >>> one = Media((), {}, {}, start=1, length=3, short_ids=(7,))
        >>> unexpanded([5, 9, 9, 9, 6], [one])
        [5, 7, 6]
    """
    short: list[int] = []
    at = 0
    for one in sorted(media, key=lambda one: one.start):
        short += [*ids[at : one.start], *one.short_ids]
        at = one.start + one.length
    return [*short, *ids[at:]]


def images_of(media: Iterable[Media]) -> list[Any]:
    """The images in the order of the tokens that stand for them."""
    return [image for one in sorted(media, key=lambda one: one.start) for image in one.images]


def media_inputs(rows: Sequence[Sequence[Media]], width: int, device: torch.device) -> dict[str, Tensor]:
    """Further inputs of a forward pass over rows of tokens that begin at column 0.

    Inputs of several samples are put one after the other along their first dimension, in the order of the rows; where
    others differ in size (tiles of an image, images of a sample) the smaller are filled up with zeros, which is how
    processors themselves make batches: models tell from `image_sizes`, from a mask or from the zeros what is real.

    Args:
        rows: the media of each row; a row without images has none.
        width: columns of the padded rows.
        device: where the inputs shall be.

    Returns:
        Inputs by name; empty where no row has images. Marks are [rows, width], 0 where nothing is marked.
    """
    every = [one for media in rows for one in media]
    names = dict.fromkeys(name for one in every for name in one.tensors)
    inputs = {name: _stacked([one.tensors[name] for one in every if name in one.tensors]).to(device) for name in names}
    for name in dict.fromkeys(name for one in every for name in one.marks):
        marks = torch.zeros(len(rows), width, dtype=torch.long)
        for row, media in enumerate(rows):
            for one in media:
                if name in one.marks:
                    marks[row, one.start : one.start + one.length] = one.marks[name]
        inputs[name] = marks.to(device)
    return inputs


def stray_placeholders(ids: Tensor, rows: Sequence[Sequence[Media]], placeholders: Tensor) -> Tensor:
    """Which tokens stand for images where there are none, [rows, width] bool: a policy may sample one.

    Args:
        ids: padded rows that begin at column 0.
        rows: the media of each.
        placeholders: tokens that stand for images, [any number].
    """
    strays = torch.isin(ids, placeholders)
    for row, media in enumerate(rows):
        for one in media:
            strays[row, one.start : one.start + one.length] = False
    return strays


@contextmanager
def reading(embedding: nn.Module, ids: Tensor, strays: Tensor, filler: int) -> Iterator[Tensor]:
    """Run a model within this context, on the tokens it yields: where `strays` says so, images are not looked for.

    A model looks for the image of each token that stands for one. A token that was sampled has none, and is read like
    any other, as engines read it when they go on from it: the model is given another token, its embedding the real one.

    Args:
        embedding: of the model's input tokens.
        ids: rows of tokens.
        strays: [rows, width] bool, of `stray_placeholders`.
        filler: any token that stands for no image.
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
    """Tokens that stand for images or videos, by a model's configuration; empty for a model of text."""
    names = [f"{kind}_token_{what}" for kind in ("image", "video") for what in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    return sorted(one for one in found if isinstance(one, int) and one >= 0)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """One after the other along the first dimension, the others filled up with zeros to the largest."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    filled = []
    for part in parts:
        if list(part.shape[1:]) != largest:
            whole = part.new_zeros(part.shape[0], *largest)
            whole[(slice(None), *(slice(size) for size in part.shape[1:]))] = part
            part = whole
        filled.append(part)
    return torch.cat(filled)
