"""Hardware support for bfloat16, and the launcher of this process."""

import importlib.util
import os
import sys
from datetime import timedelta

from covey.core.findings import CheckError
from covey.runtime.processor import cpu_multiplies_bf16

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that launchers set for each process."""


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def launched() -> bool:
    """True if torchrun, `accelerate launch` or DeepSpeed has started this process."""
    return os.environ.get("LOCAL_RANK", "-1").isdigit()  # `announce_meeting` refuses other words


def announce_meeting(use_cpu: bool) -> None:
    """Check a launcher's variables, and say on stderr that this process waits for the others.

    The message matters where the variables are left over from another run; torchrun prints its own. Raises CheckError
    for variables that are missing or contradict each other.
    """
    import torch

    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    leave = f"For a run of one process: unset {' '.join(given)}"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if name in given and not given[name].removeprefix("-").isdecimal():
            evidence = f"{name}={given[name]!r} in the environment is not a whole number, as launchers set it."
            raise CheckError.of("launcher-variables", evidence, leave)
    size = int(given.get("WORLD_SIZE", 1))
    joins = launched() or (size != 1 and (use_cpu or not has_accelerator()))
    if not joins or torch.distributed.is_initialized():
        return
    needed = [name for name in VARIABLES if size > 1 or name != "MASTER_PORT"]  # accelerate chooses one
    if missing := [name for name in needed if not given.get(name) and (launched() or name != "LOCAL_RANK")]:
        raise CheckError.of(
            "launcher-variables",
            f"{_listed(given)} in the environment, but not {', '.join(missing)}: a launcher sets all of"
            f" {', '.join(VARIABLES)}.",
            leave,
        )
    port = given.get("MASTER_PORT", "1")
    if not (port.isdecimal() and (size > 1) <= int(port) < 2**16):
        evidence = f"MASTER_PORT={port!r} in the environment is no port, a number from 1 to 65535."
        raise CheckError.of("launcher-variables", evidence, leave)
    if not 0 <= int(given["RANK"]) < size:
        evidence = f"RANK={given['RANK']} in the environment is none of WORLD_SIZE={size} processes, counted from 0."
        raise CheckError.of("launcher-variables", evidence, leave)
    if size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        print(
            f"covey: {_listed(given)} in the environment: waiting until {size} processes have joined. {leave}",
            file=sys.stderr,
        )


def _listed(given: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def meet_on_cpu(seconds: int, backend: str | None = None) -> None:
    """Join the other processes of a run on CPUs, within `seconds`; else TimeoutError.

    transformers passes a time limit only on GPUs.
    """
    import torch

    named = {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not named or os.environ["WORLD_SIZE"] == "1" or torch.distributed.is_initialized():
        return
    try:
        store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except torch.distributed.DistError as error:
        raise TimeoutError(
            f"{os.environ['WORLD_SIZE']} processes did not join within ddp_timeout={seconds} s ({error}). Start all of"
            " them, or for a run of one process: unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR."
        ) from error
    torch.distributed.init_process_group(backend or "gloo", store=store, rank=rank, world_size=size)


def require_deepspeed(what: str) -> None:
    if not importlib.util.find_spec("deepspeed"):
        raise ImportError(
            f"{what} shards with DeepSpeed, which is not installed: pip install deepspeed, or shard with fsdp2"
            " (`--accelerate_config fsdp2`), which needs no other package."
        )


def by_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def by_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def multiplies_bf16(use_cpu: bool = False) -> bool:
    """True for CUDA GPUs since Ampere, accelerators that report it, and CPUs with AMX or AVX512-BF16.

    Other hardware emulates bfloat16, or lacks it.
    """
    import torch

    if use_cpu or not has_accelerator():
        return cpu_multiplies_bf16()
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.mps.is_available():
        return False  # emulated by Metal on the chips that lack it
    from transformers.utils import is_torch_bf16_gpu_available

    return bool(is_torch_bf16_gpu_available())
