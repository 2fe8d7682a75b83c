"""Timing two ways of doing the same thing, turn by turn, so that both meet the same machine."""

import statistics
import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], turns: int = 3) -> float:
    """Print and return how many times faster `ours` is: the median of the turns' ratios, after one warm-up each."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(turns)]
    ratio = statistics.median(b / a for a, b in pairs)
    spread = ", ".join(f"{a:.2f} s against {b:.2f} s" for a, b in pairs)
    print(f"{name}: {ratio:.2f} x ({spread})", flush=True)
    return ratio
