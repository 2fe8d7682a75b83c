"""Tensors as SGLang takes them over HTTP: pickled, as base64 text. Nothing is unpickled here.

The receiver allows only functions of torch, so no class of Covey or SGLang may appear. The text holds the numbers, or
their address in this machine's shared memory.
"""

import base64
import io
import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

SHARED_MEMORY = "/dev/shm"  # shared memory on Linux; containers often get 64 MB of it


def encode(named: list[tuple[str, Tensor]], copies: int, *, shared: bool) -> list[str]:
    """One text for each of `copies` processes; of shared memory each opens a text of its own."""
    if shared:
        return [by_name(named) for _ in range(copies)]
    return [inline(own_copies(named))] * copies


def inline(tensors: Any) -> str:
    return base64.b64encode(pickle.dumps(tensors)).decode()


def own_copies(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies without shared storage, of which `inline` would write the whole for each tensor."""
    return [(name, tensor.detach().cpu().clone()) for name, tensor in named]


def shared_buffer(nbytes: int) -> Tensor:
    """A flat uint8 buffer that another process of this machine can open by name."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    buffer.untyped_storage()._share_filename_cpu_()
    return buffer


def by_name(named: list[tuple[str, Tensor]]) -> str:
    """Addresses of views of shared buffers, which must last until the one process that opens them has answered."""
    text = io.BytesIO()
    _ByName(text).dump(named)
    return base64.b64encode(text.getvalue()).decode()


def shared_memory_left() -> int:
    """Bytes that can still be shared. The system kills a process that writes beyond them."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


class _ByName(pickle.Pickler):
    """Pickler of a storage's address; torch's own passes file descriptors, which only parent and child can do."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            where = obj._share_filename_cpu_()
            obj._shared_incref()  # the receiver takes one away
            return reductions.rebuild_storage_filename, (type(obj), *where)
        if isinstance(obj, TypedStorage):
            return reductions.rebuild_typed_storage, (self._once(obj._untyped_storage), obj.dtype)
        if isinstance(obj, Tensor):
            layout = (obj.storage_offset(), obj.size(), obj.stride(), False)
            storage = TypedStorage(wrap_storage=self._once(obj.untyped_storage()), dtype=obj.dtype, _internal=True)
            return reductions.rebuild_tensor, (Tensor, storage, layout)
        return NotImplemented

    def _once(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Same object for the same memory, so that it is written, and opened, once."""
        return self._storages.setdefault(storage.data_ptr(), storage)
