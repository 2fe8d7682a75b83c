"""A version of the policy's weights: named tensors that are announced before they are sent to an engine.

Sources (any policy: whole, sharded, with an adapter; `covey.policy.weights`) make a `WeightUpdate`; sinks (every
engine) load one. `covey.trainer.weight_sync` decides when.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before it is sent: Hugging Face name, full shape, and the number format it is sent in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the policy's weights.

    Attributes:
        version: number of optimizer steps behind these weights; increases with every update.
        specs: every tensor, in the order in which `tensors` yields them. Known without gathering anything.
        tensors: starts an iteration over (name, tensor). A tensor is whole and belongs to the caller until the next
            one is requested. Under sharding the iteration is collective: every process goes through it, in step,
            whether it sends or not. A retry calls it again.
        adapter: None where the tensors are the whole model's. Otherwise they are a PEFT adapter's, under the names of
            its checkpoint, and this is its configuration (`adapter_config.json`).
        base: the adapter's base model, for an engine that does not have it; None where it cannot be sent.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    adapter: dict[str, Any] | None = None
    base: "WeightUpdate | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def checked(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Iterate over the tensors, checking each against its spec.

        Raises:
            RuntimeError: a tensor has another name, shape or dtype than its spec, or there are more or fewer.
        """
        sent = 0
        for name, tensor in self.tensors():
            if sent == len(self.specs):
                raise RuntimeError(f"weights of version {self.version}: {name!r} was sent but not announced.")
            spec = self.specs[sent]
            if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
                raise RuntimeError(
                    f"weights of version {self.version}: {spec.name!r} {list(spec.shape)} {spec.dtype} was announced,"
                    f" but {name!r} {list(tensor.shape)} {tensor.dtype} was sent."
                )
            sent += 1
            yield spec, tensor
        if sent < len(self.specs):
            raise RuntimeError(
                f"weights of version {self.version}: {len(self.specs) - sent} tensors are missing, the first is"
                f" {self.specs[sent].name!r}."
            )
