"""Reuse of freed memory, and errors that mean memory ran out."""

import ctypes
import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from covey.runtime.process_memory import (
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    available_memory,
    is_out_of_memory,
    reuse_freed_memory,
    total_memory,
)
from tests.support import launching

COUNT = """
import resource, torch
from covey.runtime.process_memory import reuse_freed_memory
reuse_freed_memory()
def work():
    for _ in range(20):
        torch.ones(12_000_000)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_large_tensors_reuse_pages():
    count = int(launching.run([sys.executable, "-c", COUNT]))
    assert count < 240  # 20 tensors of 48 MB, of 24 huge pages each at least: 480 if none were reused


@pytest.mark.parametrize(
    ("most", "accepted"),
    [(1 << 40, 1 << 30), (1 << 25, 1 << 25), (1 << 20, None)],
    ids=["any size", "32 MiB at most", "less"],
)
def test_a_libc_that_refuses_large_blocks_gets_smaller_ones(most, accepted, monkeypatch):
    taken = {}

    def mallopt(setting, value):
        if setting == M_MMAP_THRESHOLD and value > most:
            return 0
        taken[setting] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    reuse_freed_memory()
    assert taken.get(M_MMAP_THRESHOLD) == accepted
    assert (M_TRIM_THRESHOLD in taken) == (accepted is not None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=repr,
)
def test_out_of_memory_errors_are_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("key")])
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/user/job", "user/job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/user/job", "user", ("memory.max", "memory.current", "inactive_file")),  # a group above sets the limit
        ("0::/user/job", "", ("memory.max", "memory.current", "inactive_file")),  # a container sees its own as the root
        ("5:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_control_group_limits_what_is_available(tmp_path, line, folder, files):
    group, (limit, usage, reclaimable) = tmp_path / "mount" / folder, files
    (tmp_path / "mount" / "user" / "job").mkdir(parents=True)
    group.mkdir(parents=True, exist_ok=True)
    (tmp_path / "self").write_text(f"4:cpu:/other\n{line}\n")
    (group / limit).write_text("10000000\n")
    (group / usage).write_text("7000000\n")
    (group / "memory.stat").write_text(f"anon 12\n{reclaimable} 500000\n")
    assert available_memory(tmp_path / "self", tmp_path / "mount") == 3_500_000
    assert total_memory(tmp_path / "self", tmp_path / "mount") == 10_000_000
    (group / limit).write_text("max\n")
    assert available_memory(tmp_path / "self", tmp_path / "mount") > 3_500_000
    assert total_memory(tmp_path / "self", tmp_path / "mount") > 10_000_000
    (group / limit).write_text("1000\n")  # set after more was in use
    assert available_memory(tmp_path / "self", tmp_path / "mount") == 0


def test_without_control_groups_the_machine_is_the_limit(tmp_path):
    assert available_memory(tmp_path / "none", tmp_path) > 2**20
