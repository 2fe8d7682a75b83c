"""Makes torchvision importable with a CPU build of torch, in the environment of the Python that runs this.

    .venv/bin/python tools/install_torchvision.py

Image processors of vision-language models need torchvision's Python code: a wheel of 8 MB. The wheel on PyPI is built
against CUDA, so on a CPU its library of compiled operators does not load, and its Python files then fail to register
their derivatives for operators that nobody has declared. None of them resizes or normalises images, so they are
declared here by name, in a file that torchvision imports first; whoever calls one gets torch's error that it has no
implementation. A torchvision that works is left alone. May be run again.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

VERSION = "0.29.1"
DECLARED = "_declared_operators.py"
LINE = "from . import _declared_operators  # noqa: F401  (tools/install_torchvision.py)\n"


def main() -> None:
    """Install it where it is missing, and declare its operators where it does not import."""
    folder = installed()
    if folder is None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "--no-deps", f"torchvision=={VERSION}"], check=True)
        folder = installed()
        assert folder is not None, "just installed"
    if not imports():
        declare_operators(folder)
        if not imports(quiet=False):
            raise SystemExit(f"torchvision in {folder} cannot be imported beside this torch")
    print(f"torchvision works in {sys.prefix}")


def installed() -> Path | None:
    """The package's folder."""
    try:
        return Path(str(distribution("torchvision").locate_file("torchvision")))
    except PackageNotFoundError:
        return None


def imports(quiet: bool = True) -> bool:
    """True if a new process can import it with its transforms."""
    command = [sys.executable, "-c", "import torchvision.transforms.v2"]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None).returncode == 0


def declare_operators(folder: Path) -> None:
    """Write the file with the names of all operators that the package's Python files mention, and import it first."""
    files = sorted(folder.rglob("*.py"))
    names = {name for file in files for name in re.findall(r"torchvision::(\w+)", file.read_text(errors="ignore"))}
    (folder / DECLARED).write_text(
        "import torch\n\n"
        'LIBRARY = torch.library.Library("torchvision", "FRAGMENT")\n'
        f"for name in {sorted(names)!r}:\n"
        '    LIBRARY.define(name + "(Tensor a) -> Tensor")\n'
    )
    init = folder / "__init__.py"
    text = init.read_text()
    if LINE not in text:
        init.write_text(LINE + text)


if __name__ == "__main__":
    main()
