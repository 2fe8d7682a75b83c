"""What belongs to the whole process and training relies on, kept as it is while other people's code runs.

A tool or a reward that changes the working directory would have checkpoints written elsewhere; one that changes
torch's settings would change what is trained, or end it. Not here: environment variables and random states, which code
may have reasons to change.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class SurroundingsWarning(UserWarning):
    """Tools, environments or rewards changed something of the whole process; it was changed back."""


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the working directory": (os.getcwd, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
}
"""How each is read and set. Gradient mode is that of this thread."""


@contextmanager
def kept_surroundings() -> Iterator[None]:
    """Change back what the code within this context has changed, with a warning."""
    before = {name: _read(read) for name, (read, _) in SETTINGS.items()}
    try:
        yield
    finally:
        for name, (read, set_to) in SETTINGS.items():
            now = _read(read)
            if now != before[name] and before[name] is not None:
                with suppress(OSError):  # a directory that is no longer there
                    set_to(before[name])
                warnings.warn(
                    f"{name} was changed from {before[name]} to {now} while rollouts were sampled and rewarded, and was"
                    " changed back. Let tools, environments and rewards leave it as it is: it belongs to the whole"
                    " process.",
                    SurroundingsWarning,
                    stacklevel=3,
                )


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError:  # the working directory was deleted
        return None
