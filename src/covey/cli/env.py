"""`covey env`: versions and hardware, one `name: value` a line, ready to be pasted into a bug report."""

import argparse
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from covey import __version__

EXTRAS = (
    *("peft", "vllm", "sglang", "deepspeed", "bitsandbytes", "math-verify"),
    *("wandb", "trackio", "swanlab", "mlflow", "tensorboard", "optuna"),
)


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="covey env", description=__doc__).parse_args(list(argv))
    facts = environment()
    width = max(map(len, facts)) + 1
    for name, value in facts.items():
        print(f"{name + ':':<{width}} {value}")
    return 0


def environment() -> dict[str, str]:
    import torch

    from covey.config.hardware import multiplies_bf16
    from covey.runtime.packages import versions
    from covey.runtime.process_memory import total_memory
    from covey.runtime.waiting import CHOSEN

    return {
        "covey": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **versions(("torch", "transformers", "accelerate", "datasets")),
        "extras": ", ".join(f"{name} {found}" for name, found in versions(EXTRAS).items()) or "none",
        "CPU": f"{_processor()}, {usable_cores()} cores usable, {torch.get_num_threads()} torch threads",
        "threads wait": str(CHOSEN),
        "memory": f"{total_memory() / 2**30:.1f} GiB",
        "GPU": _gpus(),
        "bf16": "multiplied by the hardware"
        if multiplies_bf16()
        else "not multiplied by the hardware: float32 is used",
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()


def _gpus() -> str:
    import torch

    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in properties)
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return "none"
