"""The processor, and the library of matrix products that suits it."""

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def onednn_is_faster(few_rows: bool = False) -> bool:
    """True where oneDNN takes clearly less time than MKL: on AMD's processors, with AVX2 alone only for few rows.

    MKL has no kernels with AVX-512 for them; with AVX2 oneDNN is faster for 2 to 64 rows, as in a decoding step. It is
    a rule and not measured, because the libraries round differently: a run that is repeated or resumed must take the
    same.
    """
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
