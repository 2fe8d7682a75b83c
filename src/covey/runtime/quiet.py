"""Hiding of libraries' progress bars, next to Covey's own, and of source lines in Covey's warnings."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.runtime.packages import is_own


@contextmanager
def without_bars() -> Iterator[None]:
    """Context (or decorator) that hides progress bars of transformers and datasets, except those of downloads."""
    import datasets
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    loads, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    prepares = datasets.are_progress_bars_disabled() is False
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if loads:
            logging.enable_progress_bar()
        if prepares:
            datasets.enable_progress_bars()


def show_own_warnings_plainly() -> None:
    """Show Covey's own warnings as text, without the line of Covey's code.

    If another program has set how warnings are shown, such as a test runner or a logger, nothing is changed.
    """
    usual, shows = (getattr(warnings, name, None) for name in ("_showwarning_orig", "_showwarnmsg_impl"))
    if usual is None or warnings.showwarning is not usual or getattr(shows, "__module__", None) != "warnings":
        return

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if file is None and _warns_from_covey():
            print(f"covey: warning: {message}", file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _warns_from_covey() -> bool:
    """True if the innermost function outside of the module `warnings` is one of Covey's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    return is_own(frame.f_globals.get("__name__"))
