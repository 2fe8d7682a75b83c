"""An image that several rows of a forward pass show is encoded once.

Siblings show the same images, and a model encodes what it is given: G times the same. Within `encoded_once` the
encoder is handed each image (or tile of one) a single time, and what it makes of it is put where every row expects it.
Gradients of the rows add up at the one image, so nothing changes but rounding. Images are told apart by their pixels,
whatever a family makes of them before it encodes them. Not here: what the rows show (`covey.core.media`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from covey.policy.loading import has_dropout
from covey.policy.vlm_parts import image_encoder

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a number has: equal bits are equal pixels."""

CLOSE = 1e-2
"""What two computations of the same may differ by, of the largest number among them."""

_in_order: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether an encoder makes of two images what it makes of each, one after the other."""


@contextmanager
def encoded_once(model: Any) -> Iterator[None]:
    """Within this context, forward passes of a vision-language model encode each image once.

    An encoder with active dropout is left alone, as it makes something else of an image each time; so is one
    whose output is not in the order of its input, which its first image shows.

    Args:
        model: unwrapped, a transformers or PEFT model.
    """
    encoder = image_encoder(model)
    if encoder is None or (encoder.training and has_dropout(encoder)):
        yield
        return
    forward, patched = encoder.forward, "forward" in vars(encoder)

    def once(*args: Any, **kwargs: Any) -> Any:
        images = _Images.of(args, kwargs)
        if images is None:
            return forward(*args, **kwargs)
        if encoder not in _in_order:  # at the first pass with images, which is the same for all processes
            _in_order[encoder] = images.come_in_order(forward)
        first, places = images.distinct()
        if len(first) == len(places) or not _in_order[encoder]:
            return forward(*args, **kwargs)
        return images.put_back(images.encode(forward, first), first, places)

    encoder.forward = once
    try:
        yield
    finally:
        if patched:
            encoder.forward = forward
        else:
            del encoder.forward


@dataclass(frozen=True)
class _Images:
    """The arguments of an encoder, image by image.

    Attributes:
        args, kwargs: as the encoder gets them.
        pixels: in rows: an image or a tile each, or, where a grid [images, 3] says how many belong to which, a patch.
        sizes: rows of each image.
        beside: other tensors with something for each image: masks, the grid.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pixels: Tensor
    sizes: list[int]
    beside: list[Tensor]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Images | None":
        """None where it is not clear what belongs to which image."""
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()]
        pixels = next((one for one in tensors if one.is_floating_point()), None)
        if pixels is None:
            return None
        grid = next((one for one in tensors if one.shape[1:] == (3,) and not one.is_floating_point()), None)
        sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
        if not sizes or sum(sizes) != len(pixels):
            return None
        return cls(
            args, kwargs, pixels, sizes, [one for one in tensors if one is not pixels and len(one) == len(sizes)]
        )

    def encode(self, forward: Callable[..., Any], chosen: list[int]) -> Any:
        """What an encoder makes of some of the images."""

        def kept(given: Any) -> Any:
            if given is self.pixels:
                parts = given.split(self.sizes)
                return torch.cat([parts[image] for image in chosen])
            return given[chosen] if any(given is one for one in self.beside) else given

        return forward(*map(kept, self.args), **{name: kept(value) for name, value in self.kwargs.items()})

    def put_back(self, made: Any, chosen: list[int], places: list[int]) -> Any:
        """What was made of some images, for all: image i is like `chosen[places[i]]`.

        Raises:
            ValueError: what was made has not one row for so many of the pixels'.
        """
        if isinstance(made, Mapping):
            return type(made)(**{name: self.put_back(value, chosen, places) for name, value in made.items()})
        if isinstance(made, list | tuple):
            return type(made)(self.put_back(value, chosen, places) for value in made)
        if not isinstance(made, Tensor):
            return made
        sizes = [self.sizes[image] for image in chosen]
        out = made.shape[0] if made.dim() else 0
        if not out or any(size * out % sum(sizes) for size in sizes):
            raise ValueError("rows cannot be told apart")
        parts = made.split([size * out // sum(sizes) for size in sizes])
        return torch.cat([parts[place] for place in places])  # unlike indexing, deterministic on the way back

    @torch.no_grad()
    def come_in_order(self, forward: Callable[..., Any]) -> bool:
        """Whether an encoder makes of the first image, given twice, what it makes of it, twice."""
        alone, twice = self.encode(forward, [0]), self.encode(forward, [0, 0])
        try:
            return _alike(self.put_back(alone, [0], [0, 0]), twice)
        except ValueError:
            return False

    @torch.no_grad()
    def distinct(self) -> tuple[list[int], list[int]]:
        """The first image of each kind, and for every image the place of its kind among these."""
        known: dict[tuple[int, ...], int] = {}
        cut = [(self.pixels, self.sizes), *((one, [1] * len(self.sizes)) for one in self.beside)]
        marks = zip(self.sizes, *(_fingerprints(rows, sizes) for rows, sizes in cut), strict=True)
        places = [known.setdefault(mark, len(known)) for mark in marks]
        return [places.index(place) for place in range(len(known))], places


def _fingerprints(rows: Tensor, sizes: list[int]) -> list[int]:
    """For each image 64 bits that it shares with its equals, and with others as good as never."""
    words = rows.detach().contiguous().view(WORDS[rows.element_size()]).reshape(len(rows), -1)
    parts = [part.reshape(-1).long() for part in words.split(sizes)]
    factors = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (max(map(len, parts)),), generator=factors).to(rows.device) * 2 + 1
    return torch.stack([(part * odd[: len(part)]).sum() for part in parts]).tolist()  # wraps around, in any order


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        return bool((a - b).abs().max() <= CLOSE * b.abs().max())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return True
