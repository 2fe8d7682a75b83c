"""The processor, and the library of matrix products that suits it."""

import os
import platform
from functools import cache
from pathlib import Path

ISAS_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of the variable ONEDNN_MAX_CPU_ISA with which oneDNN does not use bfloat16 instructions."""
ISAS_WITHOUT_INT8 = frozenset({"SSE41", "AVX", "AVX2", "AVX512_CORE"})
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN does not use int8 instructions."""


@cache
def onednn_is_faster(few_rows: bool = False) -> bool:
    """True if oneDNN is clearly faster than MKL: on AMD's processors; with AVX2 only, for few rows.

    MKL has no AVX-512 kernels for them; with AVX2 oneDNN is faster for 2 to 64 rows, as in a decoding step. This is a
    rule rather than a measurement, because the libraries round differently, and a repeated or resumed run must use the
    same one.
    """
    import torch

    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    suits = capability.startswith("AVX512") or (capability == "AVX2" and few_rows)
    return suits and "AuthenticAMD" in processor()


def processor() -> str:
    """The processor's description by the operating system."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()


def cpu_multiplies_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """True if /proc/cpuinfo lists AMX or AVX512-BF16, and the environment lets oneDNN use them."""
    return _allowed(ISAS_WITHOUT_BF16) and not {"amx_bf16", "avx512_bf16"}.isdisjoint(_flags(cpuinfo))


def cpu_multiplies_int8(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """True if /proc/cpuinfo lists AMX or VNNI (of AVX-512 or AVX2), and the environment lets oneDNN use them."""
    return _allowed(ISAS_WITHOUT_INT8) and not {"amx_int8", "avx512_vnni", "avx_vnni"}.isdisjoint(_flags(cpuinfo))


def _allowed(too_old: frozenset[str]) -> bool:
    limits = {os.environ.get(name, "").upper() for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")}
    return limits.isdisjoint(too_old)


@cache
def _flags(cpuinfo: str) -> frozenset[str]:
    path = Path(cpuinfo)
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
