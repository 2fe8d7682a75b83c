"""Progress bars of libraries, left out where Covey shows its own progress."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no progress bars of transformers and datasets but those of downloads; also a decorator."""
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
