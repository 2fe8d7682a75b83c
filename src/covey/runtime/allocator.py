"""Keeps the C library from handing large tensors' memory back to the kernel after every operation.

By default glibc maps each large block anew and unmaps it when freed, so that a training step on a CPU spends its time
on page faults: hundreds of thousands per pass. Freed blocks are kept for the next tensor instead, as PyTorch's own
allocator does on a GPU. Affects the whole process, and costs memory: gaps between blocks take 15 to 60% of what
activations do (docs/scale.md).
"""

import ctypes
import sys
from collections.abc import Callable

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
BLOCKS_KEPT = (1 << 30, 1 << 25)
"""Blocks up to this size come from the heap and stay there (mallopt(3)). Some versions take no more than the second."""
HEAP_KEPT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks; whether it could be told. Other C libraries are left alone."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return _tell(mallopt)


def _tell(mallopt: Callable[[int, int], int]) -> bool:
    """Whether mallopt, which returns 0 for a value it refuses, took both settings."""
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in BLOCKS_KEPT) and bool(mallopt(M_TRIM_THRESHOLD, HEAP_KEPT))
