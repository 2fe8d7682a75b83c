"""What the policy hands to an engine that has weights of its own: named tensors, announced before they are sent.

Sources (any policy: whole, sharded, with an adapter; `covey.policy.weights`) make a `WeightUpdate`; sinks (every
engine) take one. Neither knows the other. Not here: how tensors travel (`covey.engines`), or when
(`covey.trainer.weight_sync`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before it is sent: the Hugging Face name, the full shape, and the number format it travels in."""

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
        version: optimizer steps the weights have taken; grows from update to update.
        specs: every tensor, in the order in which `tensors` yields them. Known without gathering anything.
        tensors: starts a new pass over (name, tensor). A tensor is whole and belongs to the caller until the next one
            is asked for. Under sharding a pass is collective: every process goes through it, in step, whether it sends
            or not. May be called again, which is what a retry does.
        adapter: None where the tensors are the whole model's. Otherwise they are a PEFT adapter's, under the names of
            its checkpoint, and this is its configuration (`adapter_config.json`).
        base: the model that an adapter lies on, for an engine that does not have it; None where it cannot be sent.
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
        """A pass that fails at the first tensor which is not what was announced.

        Raises:
            RuntimeError: a tensor has another name, shape or dtype than its spec, or there are more or fewer.
        """
        sent = 0
        for name, tensor in self.tensors():
            if sent == len(self.specs):
                raise RuntimeError(f"weights of version {self.version}: {name!r} was sent but never announced.")
            spec = self.specs[sent]
            if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
                raise RuntimeError(
                    f"weights of version {self.version}: announced {spec.name!r} {list(spec.shape)} {spec.dtype}, but"
                    f" {name!r} {list(tensor.shape)} {tensor.dtype} came."
                )
            sent += 1
            yield spec, tensor
        if sent < len(self.specs):
            raise RuntimeError(
                f"weights of version {self.version}: {len(self.specs) - sent} tensors are missing, the first is"
                f" {self.specs[sent].name!r}."
            )
