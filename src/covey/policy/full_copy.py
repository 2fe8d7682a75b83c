"""A whole copy of a policy whose weights are spread over processes, for as long as somebody samples from it.

The copy is a model of its own without any hooks, so that processes may run it as often as each likes. Not here: sending
weights to other engines (weights.py), which gathers them one by one and keeps none.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.quantization import is_quantised_layer
from covey.policy.sharded_tensors import reshard, travels_in, whole, whole_shape
from covey.policy.weights import checkpoint_name


class GatheredPolicy:
    """A whole twin of a sharded policy.

    Args:
        model: the policy before it is sharded; its modules are copied, not its weights.
        policy: gives the policy, sharded by then.
        dtype: matrices that are wider are kept in it: what the policy computes in. None: each as it is.

    Example:
        >>> with gathered.whole():  # collective: every process enters
        ...     gathered.model(input_ids=ids)
    """

    def __init__(self, model: Any, policy: Callable[[], Any], dtype: torch.dtype | None = None):
        self._policy = policy
        self._dtype = dtype
        empty = {
            id(p): nn.Parameter(torch.empty(whole_shape(p), dtype=p.dtype, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        quantised = {name: module for name, module in model.named_modules() if is_quantised_layer(module)}
        shared = {id(layer.quant_state): layer.quant_state for layer in quantised.values()}
        self.model: Any = copy.deepcopy(model, {**empty, **shared}).eval()
        """The twin; it holds weights within `whole()` alone."""
        self._places = _places(self.model)
        self._packed = {f"{name}.weight" for name in quantised}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The twin has the policy's present weights for the duration. Collective."""
        policy = self._policy()
        reshard(policy)
        try:
            with torch.no_grad():
                self._take(policy)
            yield
        finally:
            for places in self._places.values():
                for module, name, empty in places:
                    module._parameters[name] = empty

    def _take(self, policy: Any) -> None:
        left = set(self._places)
        for name, parameter in policy.named_parameters():
            name = checkpoint_name(name)
            dtype = None if name in self._packed else self._dtype  # 4 bits are bytes, whatever they are stored as
            made = whole(parameter, dtype).as_subclass(Tensor)
            one = nn.Parameter(made.to(travels_in(made, dtype)), requires_grad=False)
            for module, key, _ in self._places[name]:
                module._parameters[key] = one
            left.discard(name)
        assert not left, f"the policy has no {sorted(left)[:3]}"
        ours = dict(self.model.named_modules())
        for name, module in policy.named_modules():
            twin = ours.get(checkpoint_name(f"{name}.").rstrip("."))
            if twin is not None:
                twin._buffers.update(module._buffers)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str, nn.Parameter]]]:
    """Where each parameter lies: by its first name, as `named_parameters` has it, all modules that share it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key, parameter))
    return places
