"""The processor, and the library of matrix products that suits it."""

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def onednn_is_faster() -> bool:
    """True where oneDNN takes clearly less time than MKL for few rows: on AMD's processors with AVX-512.

    MKL has no kernels with AVX-512 for them; with AVX2 the two are equal for 16 rows or more. It is a rule and not
    measured, because the libraries round differently: a run that is repeated or resumed must take the same.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and "AuthenticAMD" in processor()


def processor() -> str:
    """The processor's description by the operating system."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
