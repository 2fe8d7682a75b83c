"""Buckets: tensors packed into flat buffers, with a JSON manifest that both ends check; pure torch."""

import zlib
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import TensorSpec, WeightUpdate

BUCKET_BYTES = 128 * 2**20  # large enough that requests cost little, small enough that two fit next to any model
ALIGNED = 16  # every tensor begins at a multiple of so many bytes, so that any dtype can be read in place
ROW = 8192  # bytes summed into one number of a checksum


@dataclass(frozen=True, slots=True)
class BucketEntry:
    spec: TensorSpec
    offset: int
    checksum: int


@dataclass(frozen=True)
class Bucket:
    """Tensors in one flat buffer of bytes: the `number`th bucket, from 0, of the `count` of an update."""

    entries: tuple[BucketEntry, ...]
    data: Tensor
    number: int
    count: int

    def tensors(self) -> dict[str, Tensor]:
        return {entry.spec.name: _view(self.data, entry.offset, entry.spec) for entry in self.entries}

    def __str__(self) -> str:
        first, last = self.entries[0].spec.name, self.entries[-1].spec.name
        names = first if first == last else f"{first} ... {last}"
        return f"bucket {self.number + 1} of {self.count}: {names}"

    def manifest(self) -> dict[str, Any]:
        return {
            "nbytes": self.data.numel(),
            "tensors": [
                {
                    "name": entry.spec.name,
                    "shape": list(entry.spec.shape),
                    "dtype": str(entry.spec.dtype).removeprefix("torch."),
                    "offset": entry.offset,
                    "checksum": entry.checksum,
                }
                for entry in self.entries
            ],
        }


Buckets = Generator[Bucket, None, None]


def unpack(manifest: dict[str, Any], data: Tensor) -> list[tuple[str, Tensor]]:
    """Tensors in a buffer, as views of it; ValueError if the manifest is invalid, or the bytes do not match it."""
    entries = []
    try:
        size = int(manifest["nbytes"])
        for item in manifest["tensors"]:
            name, shape, dtype = str(item["name"]), tuple(map(int, item["shape"])), dtype_named(item["dtype"])
            if dtype is None:
                raise ValueError(f"{item['dtype']!r} is no number format of torch")
            entries.append(BucketEntry(TensorSpec(name, shape, dtype), int(item["offset"]), int(item["checksum"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no manifest of tensors: {error!r} in {manifest!s:.200}") from error
    for entry in entries:
        if entry.offset < 0 or entry.offset % ALIGNED or entry.offset + entry.spec.nbytes > size:
            raise ValueError(f"{entry.spec.name!r} does not lie within the {size} bytes that its manifest announces")
    if data.numel() != size:
        raise ValueError(f"{data.numel()} bytes came where the manifest announces {size}")
    tensors = [(entry.spec.name, _view(data, entry.offset, entry.spec)) for entry in entries]
    for (name, tensor), entry in zip(tensors, entries, strict=True):
        check(name, tensor, entry.checksum)
    return tensors


def check(name: str, tensor: Tensor, expected: int) -> None:
    found = checksum(tensor)
    if found != expected:
        raise ValueError(f"{name!r} changed on its way: its checksum is {found:08x}, its manifest says {expected:08x}")


def checksum(tensor: Tensor) -> int:
    """CRC of the row and column sums of the bytes as 64-bit integers, and of the rest; only sums leave a GPU."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    rows = len(flat) // ROW
    words = flat[: rows * ROW].view(torch.int64).view(rows, ROW // 8)
    sums = torch.cat([words.sum(0), words.sum(1)]).view(torch.uint8) if rows else flat[:0]
    return zlib.crc32(torch.cat([sums, flat[rows * ROW :]]).cpu().numpy().tobytes())


def pack(
    update: WeightUpdate,
    bucket_bytes: int,
    device: torch.device | None = None,  # of the buffers; None: that of the tensors
    *,
    dense: bool = False,
) -> Buckets:
    """Pack an update into buckets of at most `bucket_bytes` (or one tensor), in two alternating buffers.

    A bucket is valid until the next but one is packed, so one can be sent while the next is filled. With `dense`, for
    receivers that expect no gaps, a tensor that would not begin at a multiple of `ALIGNED` begins the next bucket, and
    a bucket ends with its last tensor.
    """
    plan = planned(update.specs, bucket_bytes, dense=dense)
    largest = max((sum(_aligned(spec.nbytes) for spec in specs) for specs in plan), default=0)
    buffers: dict[int, Tensor] = {}
    with closing(update.checked()) as tensors:  # an error does not keep it open: other processes may take part in it
        for number, specs in enumerate(plan):
            slot, entries, offset = number % 2, [], 0
            for spec, (_, tensor) in zip(specs, tensors, strict=False):
                if slot not in buffers:
                    buffers[slot] = torch.zeros(largest, dtype=torch.uint8, device=device or tensor.device)
                placed = _view(buffers[slot], offset, spec)
                placed.copy_(tensor)
                entries.append(BucketEntry(spec, offset, checksum(placed)))
                offset += _aligned(spec.nbytes)
            assert len(entries) == len(specs), "`checked` raises where tensors are missing"
            size = entries[-1].offset + entries[-1].spec.nbytes if dense else offset
            yield Bucket(tuple(entries), buffers[slot][:size], number, len(plan))
        for _ in tensors:  # raises if there are more tensors than announced
            pass


def planned(specs: Iterable[TensorSpec], bucket_bytes: int, *, dense: bool = False) -> list[list[TensorSpec]]:
    plan: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        gap = dense and bool(plan) and used != sum(last.nbytes for last in plan[-1])
        if not plan or gap or used + _aligned(spec.nbytes) > bucket_bytes:
            plan.append([])
            used = 0
        plan[-1].append(spec)
        used += _aligned(spec.nbytes)
    return plan


def _view(data: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    return data[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def dtype_named(name: Any) -> torch.dtype | None:
    """Number format of torch, with or without "torch." before its name; None for any other name."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
