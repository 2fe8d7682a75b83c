"""Tensors in the form in which SGLang takes them over HTTP: pickled, as base64 text. Nothing is unpickled here.

The receiver rebuilds them with a list of allowed functions, all of torch's own, so no class of Covey's or SGLang's may
appear. Numbers travel inside the text, or stay in shared memory of this machine while the text only says where.
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

SHARED_MEMORY = "/dev/shm"
"""Where Linux keeps what processes share; containers often get 64 MB of it."""


def inline(tensors: Any) -> str:
    """A dict or list with CPU tensors in it, numbers included."""
    return base64.b64encode(pickle.dumps(tensors)).decode()


def own_copies(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Tensors that share no storage: `inline` would write all of a shared one for each."""
    return [(name, tensor.detach().cpu().clone()) for name, tensor in named]


def shared_buffer(nbytes: int) -> Tensor:
    """A flat uint8 buffer that another process of this machine can open by name."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    buffer.untyped_storage()._share_filename_cpu_()
    return buffer


def by_name(named: list[tuple[str, Tensor]]) -> str:
    """Views of shared buffers; one process of this machine may open them once.

    They must keep their contents until the receiver has answered.
    """
    text = io.BytesIO()
    _ByName(text).dump(named)
    return base64.b64encode(text.getvalue()).decode()


def shared_memory_left() -> int:
    """Bytes that can still be shared. A process that writes beyond them is killed by the system."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


class _ByName(pickle.Pickler):
    """Writes where a storage lies instead of what it holds, for a receiver that is not a child of this process.

    torch's own way hands file descriptors over a socket, which only relatives may open.
    """

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
        """The same object for the same memory, so that it is written, and opened, once."""
        return self._storages.setdefault(storage.data_ptr(), storage)
