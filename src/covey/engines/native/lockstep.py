"""Sampling from one model that several processes hold in parts: whoever runs it forward takes all others along.

A forward pass over sharded weights is collective, but processes sample completions of different lengths. So before each
pass every process says that it has one to run; a process that is done runs idle ones for as long as any other is not.
Not here: sampling itself, and gathered copies, which are faster where they fit (`covey.policy.full_copy`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class InStep:
    """Keeps the forward passes of all processes over one sharded model in step.

    Args:
        model: gives the model, as hooks on its forward pass see it.
        any_busy: collective: whether this process has a pass to run, to whether any has.
        device: where the model's inputs belong.
    """

    def __init__(self, model: Callable[[], Any], any_busy: Callable[[bool], bool], device: torch.device):
        self._model = model
        self._any_busy = any_busy
        self._device = device

    @contextmanager
    def together(self) -> Iterator[None]:
        """Every process may run the model as often as it likes within; it leaves when all of them are done."""
        model = self._model()

        def announce(*inputs: Any) -> None:
            self._any_busy(True)

        handle = model.register_forward_pre_hook(announce, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        one_token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        while self._any_busy(False):
            model(input_ids=one_token, use_cache=False)
