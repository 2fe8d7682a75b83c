"""Weights as differences: positions and new bits of the numbers that changed since the last update; pure torch.

A tensor is encoded in sections of `SECTION` numbers. A section has the new bits of its changed numbers, in order, and
then their positions; or all its numbers, if that is shorter. Positions are one bit per number (`mask`), or the count of
unchanged numbers before each changed one (`gaps1`, `gaps2`). A count takes words of one or two bytes: a word of all
ones is added to the next one. Numbers are compared by their bits, so 0.0 and -0.0 differ, and NaNs are sent.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.engine import TensorSpec

log = logging.getLogger(__name__)

ALIGNED = 16  # tensors and sections begin at multiples of this many bytes, so that any dtype can be read in place
SECTION = 2**24  # numbers encoded at once, which bounds the memory for their positions (8 bytes per changed number)
WIDTHS = {"gaps1": 1, "gaps2": 2}  # bytes of a word
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number; any other is compared byte by byte


class Section(NamedTuple):
    """Encoding of some numbers: `whole` without positions, `mask`, `gaps1` or `gaps2`."""

    kind: str
    changed: int  # numbers that are sent
    nbytes: int  # of their positions


@dataclass(eq=False)
class HeldWeights:
    """A copy, in host memory, of the weights that a server was last sent; the trainer and the server have one each.

    With a `folder` of a file system in memory, all processes of a server on one machine share one copy: each writes the
    same bits to the same places. The files are unlinked once an update is complete, so none outlives the server.

    Attributes:
        label: random name of the copy's content, equal at both ends; None while the content changes, and after a
            failure. Differences are made from, and applied to, only content with a known label.
        tensors: by name, in the order and number formats that they were sent in.
    """

    label: str | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None
    _becomes: str | None = None
    _files: list[Path] = field(default_factory=list)

    def begin(self, base: str | None, becomes: str) -> None:
        """Start an update: differences from the content `base`, or whole tensors (None).

        ValueError if the content held is not `base`.
        """
        if base is not None and base != self.label:
            raise ValueError(f"differences to weights {base} were sent, but this process holds {self.label}")
        self._remove_files()
        self.label, self._becomes = None, becomes
        if base is None:
            self.tensors = {}

    def finish(self) -> None:
        """End an update of which every tensor was taken: the new content has its label now."""
        self._remove_files()
        self.label = self._becomes

    def keep(self, name: str, tensor: Tensor) -> None:
        """Hold a whole tensor."""
        self.tensors[name] = self._room(tensor).copy_(tensor.detach())

    def _room(self, like: Tensor) -> Tensor:
        """Memory for a tensor, shared with other processes if there is a folder and it has room."""
        if self.folder is not None and like.nbytes:
            path = self.folder / f"covey-{self._becomes}-{len(self.tensors)}"
            try:
                _allocate(path, like.nbytes)
            except OSError as error:
                log.debug("Weights are held by each process: %s (%s)", path, error)
            else:
                self._files.append(path)
                return (
                    torch.from_file(str(path), shared=True, size=like.nbytes, dtype=torch.uint8)
                    .view(like.dtype)
                    .view(like.shape)
                )
        return torch.empty(like.shape, dtype=like.dtype)

    def _remove_files(self) -> None:
        """Unlink the files; their memory stays as long as a process uses it."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []

    def encode(self, name: str, tensor: Tensor, out: Tensor) -> tuple[tuple[Section, ...], int]:
        """Write the difference of a tensor from the held one into `out`, and hold the new one.

        `out` has the size of the tensor in bytes, rounded up to a multiple of `ALIGNED`, and is on the tensor's device;
        a difference is never larger. Returns the sections and the bytes that they take.
        """
        old, new, used = bits_of(self.tensors[name]), bits_of(tensor), 0
        sections = []
        for start in range(0, len(new), SECTION):
            held, sent = old[start : start + SECTION], new[start : start + SECTION]
            section, where, positions = _encode(held.to(sent.device), sent)
            values = sent[where]
            for part in (values.view(torch.uint8), positions):
                out[used : used + len(part)] = part
                used += len(part)
            used = aligned(used)
            held[where.to(held.device) if isinstance(where, Tensor) else where] = values.to(held.device)
            sections.append(section)
        return tuple(sections), used

    def decode(self, spec: TensorSpec, sections: tuple[Section, ...], data: Tensor) -> Tensor:
        """Apply a difference [bytes] to the held tensor, and return the tensor; ValueError if they do not fit."""
        name, whole = spec.name, self.tensors.get(spec.name)
        if whole is None or (tuple(whole.shape), whole.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"a difference of {name!r} {list(spec.shape)} was sent, but no such tensor is held here")
        held, used = bits_of(whole), 0
        if len(sections) != -(-len(held) // SECTION):
            raise ValueError(f"{len(sections)} sections were sent for the {len(held)} numbers of {name!r}")
        for number, section in enumerate(sections):
            target = held[number * SECTION : (number + 1) * SECTION]
            size = section.changed * held.element_size()
            if not 0 <= section.changed <= len(target) or not 0 <= section.nbytes <= len(data) - used - size:
                raise ValueError(f"section {number} of {name!r} does not fit: {section} in {len(data)} bytes")
            values = data[used : used + size].view(held.dtype)
            packed = data[used + size : used + size + section.nbytes]
            if section.kind == "whole":
                if section.changed != len(target):
                    raise ValueError(f"section {number} of {name!r} is whole and has {section.changed} numbers")
                target.copy_(values)
            else:
                target[_positions(section, packed, len(target))] = values
            used = aligned(used + size + section.nbytes)
        return whole

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def _allocate(path: Path, nbytes: int) -> None:
    """Reserve room in a file of this user; OSError if there is none, as writing to the mapped file would then crash."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(opened, 0, nbytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(opened)


def bits_of(tensor: Tensor) -> Tensor:
    """Numbers of a tensor as a flat tensor of integers with the same bits; a view if the tensor is contiguous."""
    return tensor.detach().reshape(-1).view(BITS.get(tensor.element_size(), torch.uint8))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def sections_of(items: Any) -> tuple[Section, ...]:
    """Sections in a manifest; TypeError if `items` are not sections."""
    try:
        return tuple(Section(str(kind), int(changed), int(nbytes)) for kind, changed, nbytes in items)
    except ValueError as error:
        raise TypeError(f"{items!r:.100} are not sections of a difference") from error


def _encode(old: Tensor, new: Tensor) -> tuple[Section, Tensor | slice, Tensor]:
    """Shortest section for the integers `new` [n], given `old` [n]; the indexes it sends, and positions [bytes]."""
    differs = old != new
    where = differs.nonzero().view(-1)  # [changed]
    changed = len(where)
    gaps = where.diff(prepend=where.new_full((1,), -1)) - 1  # [changed]
    costs = {"mask": -(-len(new) // 8)}
    for kind, width in WIDTHS.items():
        costs[kind] = width * (changed + int((gaps // _largest(width)).sum()))
    kind = min(costs, key=lambda kind: costs[kind])
    if aligned(changed * new.element_size() + costs[kind]) >= aligned(new.nbytes):
        return Section("whole", len(new), 0), slice(None), new[:0].view(torch.uint8)
    positions = _pack_mask(differs) if kind == "mask" else _pack_gaps(gaps, WIDTHS[kind])
    return Section(kind, changed, len(positions)), where, positions


def _positions(section: Section, packed: Tensor, n: int) -> Tensor:
    """Positions [changed] that a section encodes, among `n` numbers; ValueError if they do not fit the section."""
    if section.kind == "mask":
        flags = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
        where = flags.view(-1).nonzero().view(-1)
    elif section.kind in WIDTHS and section.nbytes % WIDTHS[section.kind] == 0:
        where = _unpack_gaps(packed, WIDTHS[section.kind])
    else:
        raise ValueError(f"{section} is not a section of a difference")
    if len(where) != section.changed or (len(where) and int(where[-1]) >= n):
        raise ValueError(f"the positions of {section} are not {section.changed} of {n}")
    return where


def _pack_mask(flags: Tensor) -> Tensor:
    """A bit for each flag, the first one in the lowest bit of the first byte."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _largest(width: int) -> int:
    return int(256**width - 1)


def _pack_gaps(gaps: Tensor, width: int) -> Tensor:
    """Gaps as words of `width` bytes: with one byte, 300 is (255, 45) and 255 is (255, 0)."""
    if not len(gaps):
        return gaps.to(torch.uint8)
    largest = _largest(width)
    last = (gaps // largest + 1).cumsum(0) - 1  # index of the last word of each gap
    words = gaps.new_full((int(last[-1]) + 1,), largest, dtype=torch.int32)
    words[last] = (gaps % largest).to(torch.int32)
    return torch.stack([(words >> 8 * byte) & 255 for byte in range(width)], 1).to(torch.uint8).view(-1)


def _unpack_gaps(data: Tensor, width: int) -> Tensor:
    """Positions from the words of `_pack_gaps`: the sum of all words so far, plus the number of changed ones before."""
    split = data.view(-1, width).long()
    words = split[:, 0] if width == 1 else split[:, 0] + (split[:, 1] << 8)
    last = (words != _largest(width)).nonzero().view(-1)
    return words.cumsum(0)[last] + torch.arange(len(last), device=data.device)
