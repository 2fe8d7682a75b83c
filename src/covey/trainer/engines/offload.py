"""Moving the policy and its optimizer out of an accelerator's way while an engine samples there.

`parked` is a context: within it tensors lie in host memory, afterwards they are back where they were, bit by bit, and
everything that holds them (optimizer, hooks, wrappers) holds them still. Not here: when it is worth it
(`covey.sizing.vllm_memory`, `covey explain`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


def make_room(
    device: torch.device, *, model: Callable[[], Any] | None, optimizers: Callable[[], Iterable[Any]] | None
) -> Callable[[], AbstractContextManager[None]]:
    """What an engine enters before it wakes: memory that torch keeps for later is given back, and what is asked moves.

    Args:
        device: where the policy trains.
        model: the policy, if its parameters are to move.
        optimizers: its optimizers, if their states are to move; asked when it is time, as they are made late.
    """

    def tensors() -> list[Tensor]:
        found: list[Tensor] = []
        if model is not None:
            found += [*model().parameters(), *model().buffers()]
        for optimizer in optimizers() if optimizers is not None else ():
            found += optimizer_tensors(optimizer)
        return found

    return partial(_room, device, tensors)


@contextmanager
def _room(device: torch.device, tensors: Callable[[], list[Tensor]]) -> Iterator[None]:
    with parked([tensor for tensor in tensors() if tensor.device.type == device.type]):
        if device.type == "cuda":
            torch.cuda.empty_cache()  # an engine that sleeps takes its memory from the driver, not from torch
        yield


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The states an optimizer keeps, but for single numbers such as step counts."""
    states = getattr(optimizer, "state", {}).values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]


@contextmanager
def parked(tensors: Iterable[Tensor], host: torch.device = HOST) -> Iterator[None]:
    """Keep tensors in host memory for the duration; a tensor given twice is moved once.

    The tensors stay the objects they are. Whatever else reads them within the context reads the copy in host memory.
    """
    moved: list[tuple[Tensor, torch.device]] = []
    try:
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                local = getattr(tensor, "_local_tensor", tensor)  # this process's shard of a distributed tensor
                home = local.device
                copied = torch.empty_like(local, device=host, pin_memory=home.type == "cuda", requires_grad=False)
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
    """Copies from and to pinned memory are not waited for by themselves."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
