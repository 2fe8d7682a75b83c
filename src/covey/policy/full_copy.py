"""Full copy of a sharded policy, for sampling.

The copy is a model without hooks, so that each process can run it any number of times. See also `weights.py`, which
gathers weights one by one to send them to other engines.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.quantization import is_quantized_layer
from covey.policy.sharded_tensors import full_shape, full_tensor, reshard, sent_dtype
from covey.policy.weights import checkpoint_name


class FullCopy:
    """Full copy of a sharded policy.

    Args:
        model: the policy before sharding; its modules are copied, not its weights.
        policy: gives the sharded policy.
        dtype: of the policy's computations, to which wider matrices are cast; None: no casts.

    Example:
        >>> with copy.weights():  # collective: every process enters
        ...     copy.model(input_ids=ids)
    """

    def __init__(self, model: Any, policy: Callable[[], Any], dtype: torch.dtype | None = None):
        self._policy = policy
        self._dtype = dtype
        empty = {
            id(p): nn.Parameter(torch.empty(full_shape(p), dtype=p.dtype, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        quantized = {name: module for name, module in model.named_modules() if is_quantized_layer(module)}
        shared = {id(layer.quant_state): layer.quant_state for layer in quantized.values()}
        self.model: Any = copy.deepcopy(model, {**empty, **shared}).eval()
        """The copy; it has weights within `weights()` only."""
        self._owners = _owners(self.model)
        self._packed = {f"{name}.weight" for name in quantized}

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Give the copy the policy's present weights within the context. Collective."""
        policy = self._policy()
        reshard(policy)
        try:
            with torch.no_grad():
                self._gather(policy)
            yield
        finally:
            for owners in self._owners.values():
                for module, name, empty in owners:
                    module._parameters[name] = empty

    def _gather(self, policy: Any) -> None:
        missing = set(self._owners)
        for name, parameter in policy.named_parameters():
            name = checkpoint_name(name)
            dtype = None if name in self._packed else self._dtype  # 4-bit weights are bytes, whatever their dtype
            tensor = full_tensor(parameter, dtype).as_subclass(Tensor)
            copied = nn.Parameter(tensor.to(sent_dtype(tensor, dtype)), requires_grad=False)
            for module, key, _ in self._owners[name]:
                module._parameters[key] = copied
            missing.discard(name)
        assert not missing, f"the policy has no {sorted(missing)[:3]}"
        modules = dict(self.model.named_modules())
        for name, module in policy.named_modules():
            twin = modules.get(checkpoint_name(f"{name}.").rstrip("."))
            if twin is not None:
                twin._buffers.update(module._buffers)


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str, nn.Parameter]]]:
    """All modules that share a parameter, by its first name in `named_parameters`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((module, key, parameter))
    return owners
