"""Telling a lack of memory from other errors, whichever allocator says it. Not here: what is done about it."""

import torch

WORDS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""What allocators and libraries that raise a plain RuntimeError say; the last one is cuBLAS's and cuDNN's status."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)
