"""Memory of the process: errors that mean it ran out, and the C library's reuse of freed blocks."""

import ctypes
import sys
from collections.abc import Callable

import torch

OUT_OF_MEMORY_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""In messages of allocators and libraries that raise a plain RuntimeError; the last is cuBLAS's and cuDNN's status."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
HEAP_BLOCK_BYTES = (1 << 30, 1 << 25)  # larger blocks do not come from the heap; some versions accept only the second
HEAP_BYTES = (1 << 31) - 1


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)


def reuse_freed_memory() -> bool:
    """Make glibc reuse freed blocks instead of returning them to the kernel; False with another C library.

    It saves hundreds of thousands of page faults per step on a CPU, and costs memory (docs/scale.md).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return _configure(ctypes.CDLL("libc.so.6").mallopt)
    except (OSError, AttributeError):
        return False


def _configure(mallopt: Callable[[int, int], int]) -> bool:
    """Apply both settings with mallopt, which returns 0 for a value it refuses."""
    accepted = any(mallopt(M_MMAP_THRESHOLD, size) for size in HEAP_BLOCK_BYTES)
    return accepted and bool(mallopt(M_TRIM_THRESHOLD, HEAP_BYTES))
