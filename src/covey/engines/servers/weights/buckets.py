"""Buckets: tensors packed into flat buffers, with a JSON manifest that both ends check; pure torch.

A bucket has tensors as a whole, or as differences from the tensors that the server holds (`weights.differences`).
"""

import zlib
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import TensorSpec, WeightUpdate
from covey.engines.servers.weights.differences import ALIGNED, HeldWeights, Section, aligned, sections_of

BUCKET_BYTES = 128 * 2**20  # large, so that requests cost little; small, so that two fit next to any model
ROW = 8192  # bytes that are summed into one number of a checksum


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A tensor in a bucket: whole, or with `sections` as the difference from the tensor that the server holds."""

    spec: TensorSpec
    offset: int
    checksum: int  # of the whole tensor, even if only a difference is sent
    nbytes: int  # bytes that it takes in the bucket
    sections: tuple[Section, ...] | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of a server's copy of the weights before and after an update (`HeldWeights.label`)."""

    becomes: str
    base: str | None = None  # content that the tensors are differences from; None: they are whole


@dataclass(frozen=True)
class Bucket:
    """Tensors in one flat buffer of bytes: the `number`th bucket, from 0, of the `count` of an update."""

    entries: tuple[BucketEntry, ...]
    data: Tensor
    number: int
    count: int
    labels: Labels | None = None  # None: the server keeps no copy

    def tensors(self) -> dict[str, Tensor]:
        assert all(entry.sections is None for entry in self.entries), "files have no differences"
        return {entry.spec.name: _view(self.data, entry.offset, entry.spec) for entry in self.entries}

    def __str__(self) -> str:
        first, last = self.entries[0].spec.name, self.entries[-1].spec.name
        names = first if first == last else f"{first} ... {last}"
        return f"bucket {self.number + 1} of {self.count}: {names}"

    def manifest(self) -> dict[str, Any]:
        """JSON that announces the bucket; it has `labels` and fields of differences only if they apply."""
        tensors = []
        for entry in self.entries:
            item = {
                "name": entry.spec.name,
                "shape": list(entry.spec.shape),
                "dtype": str(entry.spec.dtype).removeprefix("torch."),
                "offset": entry.offset,
                "checksum": entry.checksum,
            }
            if entry.sections is not None:
                item |= {"nbytes": entry.nbytes, "sections": [list(section) for section in entry.sections]}
            tensors.append(item)
        labels = {} if self.labels is None else {"labels": asdict(self.labels)}
        return {"nbytes": self.data.numel(), "tensors": tensors, **labels}


Buckets = Generator[Bucket, None, None]


@dataclass(eq=False)
class Receiver:
    """A server's end of updates in buckets; it keeps a copy of the weights in host memory if a trainer asks for it."""

    folder: Path | None = None  # where processes of the server share the copy
    held: HeldWeights | None = None

    def take(self, manifest: dict[str, Any], data: Tensor, number: int) -> list[tuple[str, Tensor]]:
        """Whole tensors of the `number`th bucket of an update; ValueError as of `unpack`, or if a difference is from
        another content than this process holds."""
        labels = manifest.get("labels")
        if labels is None:
            self.held = None
        elif number == 0:
            self.held = self.held or HeldWeights(folder=self.folder)
            self.held.begin(labels["base"], _checked_label(labels["becomes"]))
        return unpack(manifest, data, self.held)

    def finish(self) -> None:
        """End an update of which every bucket was taken."""
        if self.held is not None:
            self.held.finish()


def _checked_label(label: Any) -> str:
    """The label itself; ValueError if it has characters that are not safe in a file name."""
    if not str(label).isalnum():
        raise ValueError(f"{label!r} is not a label of weights: only letters and digits are allowed")
    return str(label)


def unpack(manifest: dict[str, Any], data: Tensor, held: HeldWeights | None = None) -> list[tuple[str, Tensor]]:
    """Whole tensors of a bucket, as views of `data` or on its device; `held` is updated to them.

    ValueError if the manifest is invalid, or the bytes do not match it. After an error `held` may be inconsistent.
    """
    entries = []
    try:
        size = int(manifest["nbytes"])
        for item in manifest["tensors"]:
            name, shape, dtype = str(item["name"]), tuple(map(int, item["shape"])), dtype_named(item["dtype"])
            if dtype is None:
                raise ValueError(f"{item['dtype']!r} is not a dtype of torch")
            spec, sections = TensorSpec(name, shape, dtype), item.get("sections")
            nbytes, sections = (spec.nbytes, None) if sections is None else (int(item["nbytes"]), sections_of(sections))
            entries.append(BucketEntry(spec, int(item["offset"]), int(item["checksum"]), nbytes, sections))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not a manifest of tensors: {error!r} in {manifest!s:.200}") from error
    for entry in entries:
        if entry.offset < 0 or entry.offset % ALIGNED or not 0 <= entry.nbytes <= size - entry.offset:
            raise ValueError(f"{entry.spec.name!r} does not lie within the {size} bytes that its manifest announces")
    if data.numel() != size:
        raise ValueError(f"{data.numel()} bytes were sent, but the manifest announces {size}")
    return [(entry.spec.name, _unpacked(entry, data, held)) for entry in entries]


def _unpacked(entry: BucketEntry, data: Tensor, held: HeldWeights | None) -> Tensor:
    """A whole tensor; ValueError if it does not match its checksum."""
    spec = entry.spec
    if entry.sections is None:
        tensor = _view(data, entry.offset, spec)
        check(spec.name, tensor, entry.checksum)
        if held is not None:
            held.keep(spec.name, tensor)
        return tensor
    if held is None:
        raise ValueError(f"a difference of {spec.name!r} was sent, but this process holds no weights")
    tensor = held.decode(spec, entry.sections, data[entry.offset : entry.offset + entry.nbytes].cpu())
    check(spec.name, tensor, entry.checksum)
    return tensor.to(data.device)


def check(name: str, tensor: Tensor, expected: int) -> None:
    found = checksum(tensor)
    if found != expected:
        raise ValueError(f"{name!r} changed on its way: its checksum is {found:08x}, its manifest says {expected:08x}")


def checksum(tensor: Tensor) -> int:
    """CRC of the row and column sums of the bytes, read as 64-bit integers, and of the rest; a GPU sends only sums."""
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
    labels: Labels | None = None,
    held: HeldWeights | None = None,
) -> Buckets:
    """Pack an update into buckets of at most `bucket_bytes` (or one tensor), in two alternating buffers.

    A bucket is valid until the second one after it is packed, so that one can be sent while the next is filled. `dense`
    is for receivers that expect no gaps: a tensor that would not begin at a multiple of `ALIGNED` begins the next
    bucket, and a bucket ends with its last tensor. `labels` are written into the manifests. If they name a base,
    tensors are sent as differences from `held`, the trainer's copy, which is updated.
    """
    plan = planned(update.specs, bucket_bytes, dense=dense)
    largest = max((sum(aligned(spec.nbytes) for spec in specs) for specs in plan), default=0)
    buffers: dict[int, Tensor] = {}
    differ = held is not None and labels is not None and labels.base is not None
    if held is not None and labels is not None:
        held.begin(labels.base, labels.becomes)
    with closing(update.checked()) as tensors:  # an error does not keep it open: other processes may take part in it
        for number, specs in enumerate(plan):
            slot, entries, offset = number % 2, [], 0
            for spec, (_, tensor) in zip(specs, tensors, strict=False):
                if slot not in buffers:
                    buffers[slot] = torch.zeros(largest, dtype=torch.uint8, device=device or tensor.device)
                room = buffers[slot][offset : offset + aligned(spec.nbytes)]
                if differ and held is not None:
                    sections, used = held.encode(spec.name, tensor, room)
                    entries.append(BucketEntry(spec, offset, checksum(tensor), used, sections))
                    offset += used
                    continue
                placed = _view(room, 0, spec)
                placed.copy_(tensor)
                if held is not None:
                    held.keep(spec.name, placed)
                entries.append(BucketEntry(spec, offset, checksum(placed), spec.nbytes))
                offset += aligned(spec.nbytes)
            assert len(entries) == len(specs), "`checked` raises where tensors are missing"
            size = entries[-1].offset + entries[-1].spec.nbytes if dense else max(offset, min(ALIGNED, largest))
            yield Bucket(tuple(entries), buffers[slot][:size], number, len(plan), labels)
        for _ in tensors:  # raises if there are more tensors than announced
            pass
    if held is not None and labels is not None:
        held.finish()


def planned(specs: Iterable[TensorSpec], bucket_bytes: int, *, dense: bool = False) -> list[list[TensorSpec]]:
    plan: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        gap = dense and bool(plan) and used != sum(last.nbytes for last in plan[-1])
        if not plan or gap or used + aligned(spec.nbytes) > bucket_bytes:
            plan.append([])
            used = 0
        plan[-1].append(spec)
        used += aligned(spec.nbytes)
    return plan


def _view(data: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    return data[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)


def dtype_named(name: Any) -> torch.dtype | None:
    """Torch dtype of a name, with or without "torch."; None for any other name."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
