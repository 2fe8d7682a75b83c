"""Deduplication of images: an image that occurs several times in a forward pass, as in a group, is encoded once.

Images are compared by their preprocessed pixels, and the encoder's output is copied to every occurrence. Gradients of
the occurrences add up, so results differ only by rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from covey.core.model import patched_forward
from covey.policy.adapters import image_encoder
from covey.policy.loading import has_dropout

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the size of a number in bytes, to compare pixels bit by bit."""

TOLERANCE = 1e-2  # largest difference between two computations of the same output, relative to its largest number

_in_order: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""True for encoders whose output for two images is the concatenation of their outputs for each."""


@contextmanager
def deduplicated_images(model: Any) -> Iterator[None]:
    """Context in which forward passes encode each image once, unless dropout is on or outputs cannot be assigned."""
    encoder = image_encoder(model)
    if encoder is None or (encoder.training and has_dropout(encoder)):
        yield
        return

    def once(*args: Any, **kwargs: Any) -> Any:
        images = _Images.of(args, kwargs)
        if images is None:
            return forward(*args, **kwargs)
        if encoder not in _in_order:  # the first forward pass with images is the same in all processes
            _in_order[encoder] = images.keep_order(forward)
        first, indices = images.distinct()
        if len(first) == len(indices) or not _in_order[encoder]:
            return forward(*args, **kwargs)
        return images.expand(images.encode(forward, first), first, indices)

    with patched_forward(encoder, once) as forward:
        yield


@dataclass(frozen=True)
class _Images:
    """The arguments of an encoder, divided by image."""

    args: tuple[Any, ...]  # positional arguments of the encoder's forward
    kwargs: dict[str, Any]
    # one row per image or tile; or one row per patch, with a grid [images, 3] that gives the patches of each image
    pixels: Tensor
    sizes: list[int]  # rows of each image
    others: list[Tensor]  # other tensors with a row for each image: masks, the grid

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Images | None":
        """Images of an encoder's arguments; None if the rows of each image are unclear."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        pixels = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if pixels is None:
            return None
        integers = (tensor for tensor in tensors if not tensor.is_floating_point())
        grid = next((tensor for tensor in integers if tensor.shape[1:] == (3,)), None)
        sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
        if not sizes or sum(sizes) != len(pixels):
            return None
        others = [tensor for tensor in tensors if tensor is not pixels and len(tensor) == len(sizes)]
        return cls(args, kwargs, pixels, sizes, others)

    def encode(self, forward: Callable[..., Any], chosen: list[int]) -> Any:
        def select(given: Any) -> Any:
            if given is self.pixels:
                parts = given.split(self.sizes)
                return torch.cat([parts[image] for image in chosen])
            return given[chosen] if any(given is tensor for tensor in self.others) else given

        return forward(*map(select, self.args), **{name: select(value) for name, value in self.kwargs.items()})

    def expand(self, output: Any, chosen: list[int], indices: list[int]) -> Any:
        """Output for all images from the output for `chosen` ones; ValueError if rows cannot be assigned to images."""
        sizes = [self.sizes[image] for image in chosen]

        def of_all(tensor: Tensor) -> Tensor:
            rows = tensor.shape[0] if tensor.dim() else 0
            if not rows or any(size * rows % sum(sizes) for size in sizes):
                raise ValueError("rows cannot be assigned to images")
            parts = tensor.split([size * rows // sum(sizes) for size in sizes])
            return torch.cat([parts[index] for index in indices])  # unlike indexing, deterministic in backward

        return tree_map_only(Tensor, of_all, output)

    @torch.no_grad()
    def keep_order(self, forward: Callable[..., Any]) -> bool:
        """True if the output for the first image given twice is the output for that image, twice over."""
        alone, twice = self.encode(forward, [0]), self.encode(forward, [0, 0])
        try:
            return _close(self.expand(alone, [0], [0, 0]), twice)
        except ValueError:
            return False

    @torch.no_grad()
    def distinct(self) -> tuple[list[int], list[int]]:
        """Indices of the distinct images, and for every image its index among the distinct ones."""
        known: dict[tuple[int, ...], int] = {}
        tensors = [(self.pixels, self.sizes), *((tensor, [1] * len(self.sizes)) for tensor in self.others)]
        keys = zip(self.sizes, *(_fingerprints(rows, sizes) for rows, sizes in tensors), strict=True)
        indices = [known.setdefault(key, len(known)) for key in keys]
        return [indices.index(index) for index in range(len(known))], indices


def _fingerprints(rows: Tensor, sizes: list[int]) -> list[int]:
    words = rows.detach().contiguous().view(INTEGERS[rows.element_size()]).reshape(len(rows), -1)
    parts = [part.reshape(-1).long() for part in words.split(sizes)]
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (max(map(len, parts)),), generator=generator).to(rows.device) * 2 + 1
    return torch.stack([(part * odd[: len(part)]).sum() for part in parts]).tolist()  # wraps around, in any order


def _close(a: Any, b: Any) -> bool:
    ours, theirs = ([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] for output in (a, b))
    if [x.shape for x in ours] != [y.shape for y in theirs]:
        return False
    return all(bool((x - y).abs().max() <= TOLERANCE * y.abs().max()) for x, y in zip(ours, theirs, strict=True))
