"""Versions of installed packages."""

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OWN = ("covey", "covey_tools")
"""Packages of this project."""


def is_own(module: Any) -> bool:
    """True for the name of a module of this project."""
    return str(module).partition(".")[0] in OWN


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
