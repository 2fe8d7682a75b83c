"""Freed memory is reused rather than mapped anew."""

import subprocess
import sys

import pytest

from covey.runtime.allocator import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, _tell

COUNT = """
import resource, torch
from covey.runtime.allocator import keep_freed_memory
keep = {keep} and keep_freed_memory()
def work():
    for _ in range(20):
        torch.ones(12_000_000)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, keep)
"""


def faults(keep: bool) -> tuple[int, bool]:
    done = subprocess.run([sys.executable, "-c", COUNT.format(keep=keep)], capture_output=True, text=True, check=True)
    count, kept = done.stdout.split()
    return int(count), kept == "True"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_tensors_fault_their_pages_in_once():
    count, kept = faults(True)
    if not kept:
        pytest.skip("another C library")
    assert count < faults(False)[0] / 10  # 48 MB a tensor: 12,000 pages of 4 KB each time without


@pytest.mark.parametrize(
    ("most", "accepted"),
    [(1 << 40, 1 << 30), (1 << 25, 1 << 25), (1 << 20, None)],
    ids=["any size", "32 MiB at most", "less"],
)
def test_a_library_that_refuses_large_blocks_keeps_those_it_can(most, accepted):
    taken = {}

    def mallopt(setting, value):
        if setting == M_MMAP_THRESHOLD and value > most:
            return 0
        taken[setting] = value
        return 1

    assert _tell(mallopt) == (accepted is not None)
    assert taken.get(M_MMAP_THRESHOLD) == accepted
    assert (M_TRIM_THRESHOLD in taken) == (accepted is not None)
