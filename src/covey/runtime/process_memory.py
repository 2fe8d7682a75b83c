"""Memory of the process: how much it can get, errors of running out, and reuse of freed blocks by the C library."""

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

OUT_OF_MEMORY_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""Parts of messages of allocators and libraries that raise a plain RuntimeError; the last is of cuBLAS and cuDNN."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
HEAP_BLOCK_BYTES = (1 << 30, 1 << 25)  # larger blocks do not come from the heap; some versions accept only the second
HEAP_BYTES = (1 << 31) - 1

CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers that /proc/self/cgroup names (none: version 2): files of limit and usage, and the line of
memory.stat that counts reclaimable memory."""


GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_memory(groups: Path | None = None, mount: Path | None = None) -> int:
    """Bytes that can be allocated without swapping, by the machine and the limits of the process's control groups."""
    free: int = psutil.virtual_memory().available
    for group, (limit, usage, reclaimable) in _groups(groups or GROUPS, mount or MOUNT):
        with suppress(OSError, ValueError):  # no such file, or "max"
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            unused = re.search(rf"^{reclaimable} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, most - used + int(unused[1] if unused else 0))
    return max(free, 0)


def total_memory(groups: Path | None = None, mount: Path | None = None) -> int:
    """Bytes of memory of the machine, or the smallest limit of the process's control groups (a container)."""
    total: int = psutil.virtual_memory().total
    for group, (limit, _, _) in _groups(groups or GROUPS, mount or MOUNT):
        with suppress(OSError, ValueError):
            total = min(total, int((group / limit).read_text()))
    return total


def peak_memory(device: Any) -> int:
    """Most bytes that the process has held so far: allocated on the GPU, or resident in memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _groups(groups: Path, mount: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the process's control groups, with the names of their files (`CGROUP_FILES`)."""
    text = groups.read_text() if groups.is_file() else ""
    for kind, path in re.findall(r"^\d+:(memory|):/(.*)$", text, re.MULTILINE):
        root = mount / kind
        for group in (root / path, *(root / path).parents):  # a container may see its own group as the root
            yield group, CGROUP_FILES[kind]


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)


def reuse_freed_memory() -> None:
    """Make glibc reuse freed blocks instead of returning them to the kernel; does nothing with another C library.

    It saves hundreds of thousands of page faults per step on a CPU, and costs memory (docs/scale.md).
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt  # returns 0 for a value that it refuses
        if any(mallopt(M_MMAP_THRESHOLD, size) for size in HEAP_BLOCK_BYTES):
            mallopt(M_TRIM_THRESHOLD, HEAP_BYTES)


def share_one_heap() -> None:
    """Make threads that start from now on share one heap of glibc, so that one can reuse memory that another has freed.

    Otherwise each thread would keep its own freed memory.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return blocks that glibc and MKL keep for reuse to the kernel; no thread may be computing."""
    import torch

    with suppress(OSError, AttributeError):  # torch without MKL
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")).mkl_serv_free_buffers()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
