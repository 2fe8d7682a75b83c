"""Versions of installed packages."""

import functools
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OWN = ("covey", "covey_tools")
"""Packages of this project."""


def is_own(module: Any) -> bool:
    """True for the name of a module of this project."""
    return str(module).partition(".")[0] in OWN


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    return {name: found for name in packages if (found := _version(name)) is not None}


@functools.cache  # reading one takes a millisecond, and a process imports a package once
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
