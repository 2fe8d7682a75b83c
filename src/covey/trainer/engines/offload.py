"""Offloading of the policy and its optimizer to host memory while an engine samples on the same device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def make_room(
    device: torch.device, *, model: Callable[[], Any] | None, optimizers: Callable[[], Iterable[Any]] | None
) -> Callable[[], AbstractContextManager[None]]:
    """Context for an engine to enter before it wakes: empties torch's cache and moves tensors to host memory."""

    @contextmanager
    def room() -> Iterator[None]:
        tensors = [] if model is None else [*model().parameters(), *model().buffers()]
        for optimizer in optimizers() if optimizers is not None else ():  # looked up here, as they are created late
            tensors += optimizer_tensors(optimizer)
        with parked([tensor for tensor in tensors if tensor.device.type == device.type]):
            if device.type == "cuda":
                torch.cuda.empty_cache()  # an engine that sleeps takes its memory from the driver, not from torch
            yield

    return room


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """State tensors of an optimizer, without single numbers such as step counts."""
    states = getattr(optimizer, "state", {}).values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]


@contextmanager
def parked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Move tensors to host memory within this context; a tensor given twice is moved once."""
    moved: list[tuple[Tensor, torch.device]] = []
    try:
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                local = getattr(tensor, "_local_tensor", tensor)  # this process's shard of a distributed tensor
                home = local.device
                copied = torch.empty_like(local, device="cpu", pin_memory=home.type == "cuda", requires_grad=False)
                copied.copy_(local, non_blocking=home.type == "cuda")
                moved.append((local, home))
                _wait(home)
                local.data = copied
        yield
    finally:
        with torch.no_grad():
            for local, home in moved:
                local.data = local.data.to(home, non_blocking=True)
        for home in {home for _, home in moved}:
            _wait(home)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
