"""The processor, and the library of matrix products that suits it."""

import os
import platform
from functools import cache
from pathlib import Path

ISAS_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA under which it multiplies no bfloat16."""
ISAS_WITHOUT_INT8 = frozenset({"SSE41", "AVX", "AVX2", "AVX512_CORE"})
"""Its values under which it has no instructions for sums of int8 products."""


@cache
def onednn_is_faster(few_rows: bool = False) -> bool:
    """True where oneDNN takes clearly less time than MKL: on AMD's processors, with AVX2 alone only for few rows.

    MKL has no kernels with AVX-512 for them; with AVX2 oneDNN is faster for 2 to 64 rows, as in a decoding step. It is
    a rule and not measured, because the libraries round differently: a run that is repeated or resumed must take the
    same.
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
