"""Installed packages."""

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
