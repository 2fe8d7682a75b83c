"""Description of the machine, and the path of the model."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("covey", "trl", "torch", "transformers", "accelerate")


def describe(threads: int) -> dict[str, Any]:
    """Processor, memory, threads, versions and date; no names of hosts or users."""
    return {
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_GiB": round(total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "dtype": "float32",
        "versions": {"python": sys.version.split()[0]}
        | {name: v for name in PACKAGES if (v := installed_version(name))},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def available_memory() -> int:
    """Bytes that could be taken now without swapping."""
    return _meminfo("MemAvailable")


def total_memory() -> int:
    """Bytes that the machine has."""
    return _meminfo("MemTotal")


def model_path(given: str | None) -> str:
    """The folder given, or SmolLM2-135M-Instruct as the demo has it."""
    if given:
        return given
    from covey.cli.demo import model_folder

    return str(model_folder())


def _meminfo(name: str) -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _instructions() -> list[str]:
    flags = set(_cpuinfo("flags").split())
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


def _cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return ""


def installed_version(package: str) -> str | None:
    """Version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
