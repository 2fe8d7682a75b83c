"""The reference policy: what the KL penalty measures distance from.

Three kinds: a frozen copy of the policy, the policy with its adapter switched off, and a copy that follows the policy
slowly (`sync_ref_model`). A copy may be sharded, in the way that the policy is. Not here: sharding it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.weights import reshard, whole


class Reference:
    """Gives the model that the policy is held to.

    Args:
        model: the unwrapped policy. Any model is copied as it is before training, except a PEFT model: its reference is
            its base, the adapter switched off, also where the adapter had been trained before.
        prepare: puts a copy where it is to be, sharded or whole; collective.
    """

    def __init__(self, model: Any, prepare: Callable[[Any], Any] = lambda model: model):
        self.adapter_off = hasattr(model, "disable_adapter")
        self._copy = None if self.adapter_off else prepare(_frozen_copy(model))

    @contextmanager
    def model(self, policy: Any) -> Iterator[Any]:
        """The reference, for the duration. `policy` is the unwrapped policy."""
        if self.adapter_off:
            with policy.disable_adapter():
                yield policy
        else:
            yield self._copy

    @torch.no_grad()
    def follow(self, policy: Any, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy: TR-DPO's soft update (arXiv 2404.09656, eq. 2)."""
        assert self._copy is not None, "checked with the config: an adapter's reference cannot follow it"
        reshard(self._copy)
        reshard(policy)
        for kept, current in zip(self._copy.parameters(), policy.parameters(), strict=True):
            mine = _own_part(kept)
            mine.lerp_(_own_part(current).to(mine), alpha)

    def state_dict(self) -> dict[str, Any] | None:
        """The copy's weights, of each this process's part; None for an adapter."""
        if self._copy is None:
            return None
        reshard(self._copy)
        buffers = dict(self._copy.named_buffers())
        parts = {name: _own_part(parameter) for name, parameter in self._copy.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in {**parts, **buffers}.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take weights back from a checkpoint."""
        assert self._copy is not None, "only a copy has weights of its own"
        reshard(self._copy)
        for name, parameter in self._copy.named_parameters():
            _own_part(parameter).copy_(state[name])
        for name, buffer in self._copy.named_buffers():
            buffer.copy_(state[name])


def _own_part(parameter: Any) -> Tensor:
    """The numbers that this process holds: those that all others are made of."""
    if hasattr(parameter, "ds_tensor"):
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            parameter.partition()  # a small one is kept whole beside; it is put together again when it is used
        return parameter.ds_tensor
    return getattr(parameter, "_local_tensor", parameter)


def _frozen_copy(model: Any) -> Any:
    """The model again, with its weights; where ZeRO-3 has split them as they were loaded, one by one."""
    twins: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            twins[id(parameter)] = nn.Parameter(whole(parameter), requires_grad=False)
            parameter.convert_to_zero_parameters(param_list=[twins[id(parameter)]])
    duplicate: Any = copy.deepcopy(model, dict(twins))
    return duplicate.requires_grad_(False).eval()
