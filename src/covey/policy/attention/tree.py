"""Visibility between the tokens of one row: a forest of segments, each attending to itself and to its ancestors.

Segments are in depth-first order, so the descendants of a segment follow it directly, and two numbers per token define
visibility: query q sees key k exactly if `k <= q < reach[k]` and, in a window, `position[q] - position[k] < window`.
Packed sequences are roots without children; completions that share a prompt are the children of the prompt's segment.
See also `merged.py` (attention on any device) and `flex.py` (on CUDA).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BAND_BLOCK = 256
"""Most queries of a part with a sliding window, whose mask is [256, 256 + window] at most."""


class Part(NamedTuple):
    """A rectangle of the row's attention matrix, all of whose queries see at least one of its keys.

    Query i of the part sees its key j if `0 <= i + shift - j < window`.

    Attributes:
        queries, keys: ranges of the row.
        causal: exactly the lower triangle is visible; the part is square.
        band: (shift, window) where a sliding window cuts, or None.
    """

    queries: slice
    keys: slice
    causal: bool = False
    band: tuple[int, int] | None = None

    def visible(self, device: torch.device) -> Tensor | None:
        """[queries, keys] bool, or None where every query sees every key."""
        rows, columns = (span.stop - span.start for span in (self.queries, self.keys))
        if self.causal:
            return torch.ones(rows, columns, dtype=torch.bool, device=device).tril_()
        if self.band is None:
            return None
        shift, window = self.band
        back = torch.arange(shift, shift + rows, device=device)[:, None] - torch.arange(columns, device=device)
        return (back >= 0) & (back < window)


class Parts(NamedTuple):
    """The attention of a row as rectangles.

    Attributes:
        own: attention of segments to themselves; the queries cover the row exactly once.
        ancestors: attention of segments to their ancestors.
    """

    own: list[Part]
    ancestors: list[Part]


class TokenTree:
    """The segments of a row.

    Neither a dataclass nor a tuple, so that wrappers that move or cast tensors leave it alone.

    Attributes:
        starts, stops: each segment's range of the row.
        parents: the segment that each continues, or -1.
        offsets: the position of each segment's first token in its sequence.
        reaches: end of the descendants of each segment.

    Example:
        A prompt of 3 tokens with completions of 2 and 4: `TokenTree([3, 2, 4], [-1, 0, 0])`.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]):
        """Lengths [S] >= 1 and parents [S] in depth-first order: a parent before its children, families together."""
        self.parents = list(parents)
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.offsets: list[int] = []
        start = 0
        for length, parent in zip(lengths, parents, strict=True):
            self.starts.append(start)
            start += length
            self.stops.append(start)
            self.offsets.append(0 if parent < 0 else self.offsets[parent] + lengths[parent])
        self.size = start
        self.reaches = list(self.stops)
        for segment in reversed(range(len(self.parents))):
            parent = self.parents[segment]
            if parent >= 0:
                self.reaches[parent] = max(self.reaches[parent], self.reaches[segment])
        self.cache: dict[Any, Any] = {}
        """Values that attention derives from the tree once per forward pass, by name and arguments."""

    def positions(self) -> Tensor:
        """Position of each token in its sequence, [T] int64 on the CPU."""
        spans = zip(self.offsets, self.starts, self.stops, strict=True)
        return torch.cat([torch.arange(offset, offset + stop - start) for offset, start, stop in spans])

    def reach(self) -> Tensor:
        """End of the queries that may see each token, [T] int64 on the CPU."""
        lengths = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        return torch.tensor(self.reaches).repeat_interleave(torch.tensor(lengths))

    def parts(self, window: int | None) -> Parts:
        """The visible pairs as few large rectangles, cached by window.

        Without a window, the descendants of a segment see all of it, whatever their order: one rectangle, unmasked.
        """
        key = ("parts", window)
        if key in self.cache:
            return self.cache[key]
        own: list[Part] = []
        ancestors: list[Part] = []
        for segment, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            if window is None or stop - start <= window:
                own.append(Part(slice(start, stop), slice(start, stop), causal=True))
            else:
                own += self._banded(segment, segment, window)
            reach = self.reaches[segment]
            if reach == stop:
                continue
            if window is None:
                ancestors.append(Part(slice(stop, reach), slice(start, stop)))
                continue
            children = [other for other in range(segment + 1, len(self.parents)) if self.starts[other] < reach]
            longest = max(self.offsets[c] + self.stops[c] - self.starts[c] for c in children) - self.offsets[segment]
            if longest <= window:
                ancestors.append(Part(slice(stop, reach), slice(start, stop)))
                continue
            for child in children:
                ancestors += self._banded(child, segment, window)
        self.cache[key] = Parts(own, ancestors)
        return self.cache[key]

    def _banded(self, segment: int, ancestor: int, window: int) -> list[Part]:
        """Attention of a segment to an ancestor or itself, in blocks of queries with only the keys in their window."""
        parts = []
        gap = self.offsets[segment] - self.offsets[ancestor]
        keys = self.stops[ancestor] - self.starts[ancestor]
        for first in range(0, self.stops[segment] - self.starts[segment], BAND_BLOCK):
            last = min(first + BAND_BLOCK, self.stops[segment] - self.starts[segment])
            # A query at i sees keys i + gap - window + 1 ... i + gap; later ones see none of this ancestor.
            last = min(last, keys - 1 + window - gap)
            if last <= first:
                break
            low, high = max(0, first + gap - window + 1), min(keys, last + gap)
            at, base = self.starts[segment], self.starts[ancestor]
            band = (first + gap - low, window)
            parts.append(Part(slice(at + first, at + last), slice(base + low, base + high), band=band))
        return parts
