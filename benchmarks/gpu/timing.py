"""Milliseconds of calls on a GPU, and the most memory that they take."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def milliseconds(call: Callable[[], Any], device: str, turns: int, warm_seconds: float = 0.0) -> float:
    """Median milliseconds of a call over `turns`, after one that is not counted.

    On CUDA by events, so that launches overlap with computing as they do in a run.
    """
    import torch

    until = time.perf_counter() + warm_seconds
    call()
    while time.perf_counter() < until:
        call()
        synchronize(device)
    if device != "cuda":
        times = []
        for _ in range(turns):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    pairs = []
    for _ in range(turns):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        call()
        end_event.record()
        pairs.append((start_event, end_event))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Bytes that a call takes at most beyond what is there before; None on a CPU."""
    import torch

    if device != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def synchronize(device: str) -> None:
    """Wait for the device."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
