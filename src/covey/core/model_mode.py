"""Training and inference mode of a module, put back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Dropout off and gradient checkpointing idle for the duration; every module's own mode is restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
