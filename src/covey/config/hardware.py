"""Hardware support for bfloat16, and the launcher of this process."""

import os
from functools import cache
from pathlib import Path

import torch
from transformers.utils import is_torch_bf16_gpu_available


def has_accelerator() -> bool:
    return torch.accelerator.is_available()


def launched() -> bool:
    """True if torchrun, `accelerate launch` or DeepSpeed has started this process."""
    return int(os.environ.get("LOCAL_RANK", "-1")) >= 0


def by_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def by_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def multiplies_bf16(use_cpu: bool = False) -> bool:
    """True for CUDA GPUs since Ampere, accelerators that report it, and CPUs with AMX or AVX512-BF16; else emulated."""
    if use_cpu or not has_accelerator():
        return cpu_multiplies_bf16()
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.mps.is_available():
        return False  # emulated by Metal on the chips that lack it
    return bool(is_torch_bf16_gpu_available())


@cache
def cpu_multiplies_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """True if /proc/cpuinfo lists AMX or AVX512-BF16; False without such a file."""
    path = Path(cpuinfo)
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags.split())
